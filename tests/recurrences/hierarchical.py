"""Lin et al. 2018, section 5: averages in blocks of workers between those of all."""

from recurrences import PERIOD, local_steps, mean

SETTINGS = [
    {"period": PERIOD, "inner_period": 2},
    {"period": 6, "inner_period": 4},
    {"period": PERIOD, "inner_period": 3, "groups": 1},
]


def recurrence(workers, period, inner_period, groups=None):
    if groups is None:
        divisors = [d for d in range(1, workers + 1) if workers % d == 0]
        groups = max(d for d in divisors if d * d <= workers)
    size = workers // groups
    for step, theta in local_steps(workers):
        if (step + 1) % period == 0:
            theta[:] = [mean(theta)] * workers
        elif (step + 1) % inner_period == 0:
            for start in range(0, workers, size):
                group = slice(start, start + size)
                theta[group] = [mean(theta[group])] * size
        yield mean(theta), theta
