"""The number of lanes whose batches a merged gradient takes at a time on CPUs.

As many as the caches hold, yet so many that a group's own results outweigh the weights
that it reads, and the gradients that it adds to those of the groups before.
"""

from collections.abc import Iterator
from typing import Any

import jax
from jax.extend import core

from syncalgos.strategy import PyTree

# LeNet's 128 lanes of a device take 2.3 times as long at once as one by one, the MLP's
# 1.3 times as long one by one as 16 at a time, the LSTM's as 8 (docs/performance.md).
CACHED = 4e6  # bytes that the forward pass of a group computes
OUTWEIGHS = 4  # times the bytes of weights


def size(few: Any, many: Any, lanes: int, params: PyTree) -> int:
    """Returns the lanes of a group, a divisor of all.

    Args:
        few: the closed jaxpr of a forward pass of one lane.
        many: that over the batches of all lanes.
        lanes: their number, at least 2.
        params: of the model, or their shapes.
    """
    computed, read = results(few.jaxpr), _multiplied(few.jaxpr)
    # What grows with the lanes is of their batches, the rest of what they share.
    batch = (results(many.jaxpr) - computed) / (lanes - 1)
    weights = read - (_multiplied(many.jaxpr) - read) / (lanes - 1)
    params_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
    wanted = max(CACHED, OUTWEIGHS * max(weights, params_bytes)) / max(batch, 1)
    wanted = min(max(wanted, 1), lanes)
    divisors = [n for n in range(1, lanes + 1) if lanes % n == 0]
    return min(divisors, key=lambda n: max(n / wanted, wanted / n))


def results(jaxpr: Any) -> int:
    """Bytes of all results of a jaxpr; of loops, in all turns that are known."""
    return sum(times * sum(map(_bytes, e.outvars)) for e, times in _run(jaxpr))


def _multiplied(jaxpr: Any) -> int:
    """Bytes of all that matmuls read, in all turns of loops."""
    matmuls = [x for x in _run(jaxpr) if x[0].primitive.name == "dot_general"]
    return sum(times * sum(map(_bytes, e.invars)) for e, times in matmuls)


def _run(jaxpr: Any, times: int = 1) -> Iterator[tuple[Any, int]]:
    """All equations that hold no others, and how often each is run."""
    for equation in jaxpr.eqns:
        inner = [*core.jaxprs_in_params(equation.params)]
        turns = times * equation.params.get("length", 1)
        for one in inner:
            yield from _run(one, turns)
        if not inner:
            yield equation, times


def _bytes(x: Any) -> int:
    return x.aval.size * x.aval.dtype.itemsize
