"""Chen et al. 2016; in few bits it is the QSGD of Alistarh 2017."""

from recurrences import in_step, mean, quantized_sgd

SETTINGS = [{"reduce": "int4", "seed": 5}, {}]
BITS = {"int8": 8, "int4": 4, "int2": 2}


def recurrence(workers, reduce="mean", seed=0):
    if reduce in BITS:
        return quantized_sgd.recurrence(workers, BITS[reduce], seed)

    def averaged(grads, theta, step):
        return [mean(grads)] * workers

    return in_step(workers, averaged)
