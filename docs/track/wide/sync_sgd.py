"""Averages every gradient.

Tried: 8 rates from 0.0016 to 0.205, by 5 seeds each.
"""

import syncalgos

TRACK = "track-wide"
FLAGS = "--lr 0.102"


def strategy():
    return syncalgos.sync_sgd()
