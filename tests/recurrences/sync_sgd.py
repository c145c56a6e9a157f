"""Chen et al. 2016; in few bits it is the QSGD of Alistarh 2017."""

from recurrences import local_steps, mean, quantized_sgd

SETTINGS = [{"reduce": "int4", "seed": 5}, {}]
BITS = {"int8": 8, "int4": 4, "int2": 2}


def recurrence(workers, reduce="mean", seed=0):
    if reduce in BITS:
        yield from quantized_sgd.recurrence(workers, BITS[reduce], seed)
        return

    def averaged(grads, theta, step):
        return [mean(grads)] * workers

    for _, theta in local_steps(workers, combine=averaged):
        yield theta[0], theta
