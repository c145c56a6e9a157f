"""Chooses how many lanes' batches a merged gradient takes at a time on CPUs.

A group should fit into the caches. It should also be large enough that its results
outweigh the weights that it reads and the gradients that it adds to earlier groups'.
"""

from typing import Any

import jax

from syncalgos._jaxprs import equations, inner
from syncalgos.strategy import PyTree

# With 128 lanes on a device, LeNet takes 2.3 times as long all at once as one by one.
# The MLP takes 1.3 times as long one by one as 16 at a time, the LSTM 1.3 times as long
# as 8 at a time (docs/measured.md).
CACHED = 4e6  # bytes that the forward pass of a group computes
OUTWEIGHS = 4  # times the bytes of weights


def size(few: Any, many: Any, lanes: int, params: PyTree) -> int:
    """Returns the number of lanes in a group, a divisor of all lanes.

    Args:
        few: the jaxpr of a forward pass over one lane's batch.
        many: the jaxpr of a forward pass over the batches of all lanes.
        lanes: the number of lanes, at least 2.
        params: the model's params, or their shapes.
    """
    computed, read = results(few), _multiplied(few)
    # Results that grow with the lanes come from batches; the rest is shared.
    batch = (results(many) - computed) / (lanes - 1)
    weights = read - (_multiplied(many) - read) / (lanes - 1)
    params_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
    wanted = max(CACHED, OUTWEIGHS * max(weights, params_bytes)) / max(batch, 1)
    wanted = min(max(wanted, 1), lanes)
    divisors = [n for n in range(1, lanes + 1) if lanes % n == 0]
    return min(divisors, key=lambda n: max(n / wanted, wanted / n))


def results(jaxpr: Any) -> int:
    """Counts the bytes of all results of a jaxpr, in all known passes of loops."""
    ran = [x for x in equations(jaxpr) if not inner(x[0])]
    return sum(times * sum(map(_bytes, e.outvars)) for e, times in ran)


def _multiplied(jaxpr: Any) -> int:
    """Counts the bytes that matmuls read, in all passes of loops."""
    matmuls = [x for x in equations(jaxpr) if x[0].primitive.name == "dot_general"]
    return sum(times * sum(map(_bytes, e.invars)) for e, times in matmuls)


def _bytes(x: Any) -> int:
    return x.aval.size * x.aval.dtype.itemsize
