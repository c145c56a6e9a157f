"""Averages params every 16 steps.

Tried: nothing here; the rate is that of docs/studies/atlas.md.
"""

import syncalgos

FLAGS = "--lr 0.0487"


def strategy():
    return syncalgos.model_averaging()
