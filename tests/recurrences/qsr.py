"""Gu et al. 2024, equation 2: rounds of max(H₀, ⌊(α / η)²⌋) local steps.

The paper asks η at the start of a round, and during the warm-up right after it.
"""

from math import floor

from recurrences import LR, PERIOD, STEPS, falling, local_steps, mean, rate


def tent(step):
    """A schedule that rises up to step 5 and falls from there on, exact in float32."""
    return (26 - 2 * abs(step - 5)) / 128


SETTINGS = [
    {"period": 2, "growth": 0.3, "learning_rate": falling},
    {"period": PERIOD, "learning_rate": LR},
    {"period": PERIOD, "growth": 0.45, "learning_rate": LR},
    {"period": 2, "growth": 0.3, "learning_rate": tent},
]


def recurrence(workers, period, learning_rate, growth=0.2):
    end = 0
    for step, theta in local_steps(workers, learning_rate):
        if step == end:  # a round starts
            eta = max(rate(learning_rate, later) for later in range(step, STEPS))
            end = step + max(period, floor((growth / eta) ** 2))
        if step + 1 == end:
            theta[:] = [mean(theta)] * workers
        yield mean(theta), theta
