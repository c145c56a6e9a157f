"""Averages every 8 steps, with Nesterov block momentum.

Tried: rates 0.0128, 0.0256 and 0.0512 with 3 seeds each.
"""

import syncalgos

TRACK = "track-wide"
FLAGS = "--lr 0.0128"


def strategy():
    return syncalgos.bmuf(8, nesterov=True)
