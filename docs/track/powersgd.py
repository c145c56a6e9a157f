"""Sends gradients of rank 2.

Tried: rank 1 for 900 steps at three rates by 5 seeds each: 82 % at most. The rate is
the best for rank 2 of 8 from 0.0016 to 0.205, in the atlas of 0.2.
"""

import syncalgos

FLAGS = "--lr 0.102"


def strategy():
    return syncalgos.powersgd(rank=2)
