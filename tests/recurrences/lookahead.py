"""Zhang et al. 2019, algorithm 1, of the mean of the workers' fast weights."""

from recurrences import PERIOD, START, local_steps, mean

SETTINGS = [{"period": 3, "slow_lr": 0.8}, {"period": PERIOD}]
VARIANTS = {"one_worker": (SETTINGS[0], {"workers": 1})}


def recurrence(workers, period, slow_lr=0.5):
    slow = START
    for step, theta in local_steps(workers):
        if (step + 1) % period == 0:
            slow = slow + slow_lr * (mean(theta) - slow)
            theta[:] = [slow] * workers
        yield slow, theta
