"""Li 2018, algorithm 2, all workers."""

from recurrences import PERIOD, START, local_steps, mean

SETTINGS = [{"period": PERIOD, "proximal": 0.7}, {"period": PERIOD}, {"period": 1}]


def recurrence(workers, period, proximal=0.01):
    x = START

    def pulled(grads, theta, step):
        return [grads[i] + proximal * (theta[i] - x) for i in range(workers)]

    for step, theta in local_steps(workers, combine=pulled):
        if (step + 1) % period == 0:
            x = mean(theta)
            theta[:] = [x] * workers
        yield mean(theta), theta
