"""Acar 2021, algorithm 1, all workers: gradients λ of the workers, h of the server."""

import numpy as np

from recurrences import PERIOD, START, local_steps, mean

SETTINGS = [{"period": 3, "proximal": 0.6}, {"period": PERIOD}]


def recurrence(workers, period, proximal=0.1):
    x = START
    h = np.zeros_like(START)
    worker_grads = [np.zeros_like(START)] * workers

    def regularised(grads, theta, step):
        pulls = [proximal * (theta[i] - x) for i in range(workers)]
        return [grads[i] - worker_grads[i] + pulls[i] for i in range(workers)]

    for step, theta in local_steps(workers, combine=regularised):
        if (step + 1) % period == 0:
            worker_grads[:] = [
                worker_grads[i] - proximal * (theta[i] - x) for i in range(workers)
            ]
            h = h - proximal * (mean(theta) - x)
            x = mean(theta) - h / proximal
            theta[:] = [x] * workers
        yield x, theta
