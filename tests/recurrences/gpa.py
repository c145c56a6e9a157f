"""Defazio et al. 2025, primal averaging of the way d(y) of any optimizer."""

from recurrences import START, local_steps, mean

SETTINGS = [{"mixing": 0.2}, {"decay": 0.9}, {"decay": 0.5, "mixing": 1.0}]


def recurrence(workers, decay=0.98, mixing=0.7):
    x = z = y = START

    def averaged(grads, theta, step):
        return [mean(grads)] * workers

    for _, theta in local_steps(workers, combine=averaged):
        z = z + (theta[0] - y)
        x = decay * x + (1 - decay) * z
        y = mixing * x + (1 - mixing) * z
        theta[:] = [y] * workers
        yield x, theta
