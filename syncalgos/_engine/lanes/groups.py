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
CACHE_BYTES = 4e6  # bytes that the forward pass of a group computes
MIN_WEIGHT_RATIO = 4  # times the bytes of weights


def choose_group_size(
    lane_jaxpr: Any, lanes_jaxpr: Any, lanes: int, params: PyTree
) -> int:
    """Returns the number of lanes in a group, a divisor of all lanes.

    Args:
        lane_jaxpr: the jaxpr of a forward pass over one lane's batch.
        lanes_jaxpr: the jaxpr of a forward pass over the batches of all lanes.
        lanes: the number of lanes, at least 2.
        params: the model's params, or their shapes.
    """
    lane_bytes = count_result_bytes(lane_jaxpr)
    read_bytes = _count_matmul_bytes(lane_jaxpr)
    # Results that grow with the lanes come from batches; the rest is shared.
    batch_bytes = (count_result_bytes(lanes_jaxpr) - lane_bytes) / (lanes - 1)
    added_bytes = (_count_matmul_bytes(lanes_jaxpr) - read_bytes) / (lanes - 1)
    weight_bytes = read_bytes - added_bytes
    params_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
    group_bytes = max(CACHE_BYTES, MIN_WEIGHT_RATIO * max(weight_bytes, params_bytes))
    target_lanes = group_bytes / max(batch_bytes, 1)
    target_lanes = min(max(target_lanes, 1), lanes)
    divisors = [n for n in range(1, lanes + 1) if lanes % n == 0]
    return min(divisors, key=lambda n: max(n / target_lanes, target_lanes / n))


def count_result_bytes(jaxpr: Any) -> int:
    """Counts the bytes of all results of a jaxpr, in all known passes of loops."""
    total = 0
    for equation, times in equations(jaxpr):
        if not inner(equation):
            total += times * sum(map(_count_bytes, equation.outvars))
    return total


def _count_matmul_bytes(jaxpr: Any) -> int:
    """Counts the bytes that matmuls read, in all passes of loops."""
    total = 0
    for equation, times in equations(jaxpr):
        if equation.primitive.name == "dot_general":
            total += times * sum(map(_count_bytes, equation.invars))
    return total


def _count_bytes(x: Any) -> int:
    return x.aval.size * x.aval.dtype.itemsize
