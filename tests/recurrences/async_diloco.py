"""Liu et al. 2024, algorithm 3: a server with delayed Nesterov, by events in order.

Workers' speeds fall evenly, in 1024ths; the clock is the first one's local step.
"""

import numpy as np

from recurrences import PERIOD, START, local_steps

SETTINGS = [
    {
        "period": 5,
        "slowest": 0.25,
        "dynamic_steps": True,
        "buffer": 2,
        "early_momentum": 0.2,
    },
    {"period": PERIOD},
    {"period": 3, "slowest": 0.3, "outer_lr": 0.5, "outer_momentum": 0.6},
    {"period": 2, "slowest": 1.0, "buffer": 3, "early_momentum": 0.2},
]


class Server:
    """The server's lines of the algorithm."""

    def __init__(self, theta, lr, momentum, buffer, early):
        self.theta = theta
        self.m = 0 * theta
        self.delta = 0 * theta
        self.t = 0
        self.settings = lr, momentum, buffer, early

    def push(self, update):
        lr, beta, buffer, c = self.settings
        self.delta = self.delta + update
        if (self.t + 1) % buffer == 0:
            self.m = beta * self.m + self.delta / buffer
            part = 1 - c * buffer + c
            self.delta = 0 * update
        else:
            part = c
        self.theta = self.theta - lr * (part * beta * self.m + update / buffer)
        self.t += 1
        return self.theta


def worker_speeds(workers, slowest):
    """The speeds in 1024ths, which fall evenly from 1 to `slowest`."""
    slowdown = 1024 - round(1024 * slowest)
    return [1024 - slowdown * i // max(workers - 1, 1) for i in range(workers)]


def arrivals(workers, period, slowest, dynamic_steps=False, momentum=None):
    """Yields (step, θ, the workers that end a round in it); others rest meanwhile.

    Args:
        workers: the number of workers.
        period: the local steps of a round.
        slowest: the speed of the last worker.
        dynamic_steps: whether slower ones take fewer.
        momentum: where the workers' own is held, which then rests as they do.
    """
    speeds = worker_speeds(workers, slowest)
    periods = [period * s // 1024 if dynamic_steps else period for s in speeds]
    old_theta = [START] * workers
    old_momentum = [np.zeros_like(START)] * workers
    for step, theta in local_steps(workers, momentum=momentum):
        ended = []
        for i, speed in enumerate(speeds):
            old_steps = step * speed // 1024
            new_steps = (step + 1) * speed // 1024
            if new_steps == old_steps:
                theta[i] = old_theta[i]
                if momentum is not None:
                    momentum[i] = old_momentum[i]
            elif new_steps % periods[i] == 0:
                ended.append(i)
        yield step, theta, ended
        old_theta = list(theta)
        old_momentum = list(momentum or old_momentum)


def recurrence(
    workers,
    period,
    outer_lr=0.7,
    outer_momentum=0.4,
    slowest=0.5,
    dynamic_steps=False,
    buffer=None,
    early_momentum=0.0,
    momentum=None,
):
    server = Server(START, outer_lr, outer_momentum, buffer or workers, early_momentum)
    start = [START] * workers
    rounds = arrivals(workers, period, slowest, dynamic_steps, momentum)
    for _, theta, ended in rounds:
        for i in ended:
            theta[i] = start[i] = server.push(start[i] - theta[i])
        yield server.theta, theta
