"""Lin et al. 2018, section 3: synchronous gradients first, local SGD from a step on."""

from recurrences import PERIOD, local_steps, mean

SETTINGS = [
    {"dense_steps": 5, "period": PERIOD},
    {"dense_steps": 0, "period": PERIOD},
    {"dense_steps": 4, "period": 3},
]


def recurrence(workers, dense_steps, period):
    def synchronous_first(grads, theta, step):
        return [mean(grads)] * workers if step < dense_steps else grads

    for step, theta in local_steps(workers, combine=synchronous_first):
        if step >= dense_steps and (step + 1) % period == 0:
            theta[:] = [mean(theta)] * workers
        yield mean(theta), theta
