"""Takes outer Nesterov steps every 16 steps.

Tried: 6 rates from 0.0032 to 0.102, by 5 seeds each.
"""

import syncalgos

TRACK = "track-wide"
FLAGS = "--lr 0.0256"


def strategy():
    return syncalgos.diloco(16)
