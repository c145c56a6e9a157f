"""Zhang 2015, equations 3 and 4; with momentum, equations 5 and 6 (EAMSGD)."""

from recurrences import PERIOD, START, local_steps, mean

SETTINGS = [
    {"period": PERIOD, "beta": 0.4},
    {"period": PERIOD},
    {"period": 1, "beta": 0.6},
]


def recurrence(workers, period, beta=0.9):
    alpha = beta / workers
    c = START
    x = [START] * workers
    for step, theta in local_steps(workers):
        if (step + 1) % period == 0:
            for i in range(workers):
                theta[i] = theta[i] - alpha * (x[i] - c)
            c = c + beta * (mean(x) - c)
        x = list(theta)  # the next step's old values
        yield c, theta
