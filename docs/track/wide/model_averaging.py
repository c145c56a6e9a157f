"""Averages params every 16 steps.

Tried: 8 rates from 0.0016 to 0.205, by 5 seeds each.
"""

import syncalgos

TRACK = "track-wide"
FLAGS = "--lr 0.0512"


def strategy():
    return syncalgos.model_averaging()
