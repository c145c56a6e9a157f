"""Random compositions on random trees: alike on all backends, or refused.

Strategies are drawn as the text of an expression, so that a failure shows what to type.
"""

import itertools
import random
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import Phase, event, given, note, settings
from hypothesis import strategies as st
from owed import make, parameters
from problems.held import Held

import syncalgos as sa
from syncalgos.engine.placement.make_layout import BACKENDS

STEPS, BATCH = 6, 2
EXAMPLES = itertools.count(1)

# Differences between backends: of sums in another order, after six steps.
ROUNDING = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 0.1}


class Leaf(NamedTuple):
    """A part of a strategy; `{n}` stands for small numbers that are drawn.

    Attributes:
        text: an expression.
        decides: by values, as compressors do: what is rounded otherwise may decide
            otherwise, and be any distance away.
    """

    text: str
    decides: bool = False


# Algorithms that decide by values.
DECIDING = {"choco_sgd", "demo", "dgc", "diloco_x", "distributed_lion", "dion", "ef21"}
DECIDING |= {"dynamic_averaging", "edit", "loco", "one_bit_adam", "powersgd"}
DECIDING |= {"pulseloco", "quantized_sgd", "sign_sgd", "signum", "sparseloco"}
DECIDING |= {"topk_sgd", "zero_one_adam"}


def algorithm(name):
    """An algorithm, with any period."""
    period = ", period={n}" if "period" in parameters(name) else ""
    return Leaf(f"make('{name}'{period})", decides=name in DECIDING)


LEAVES = [
    *map(algorithm, sa.ALGORITHMS),
    Leaf("sa.Strategy()"),
    Leaf("sa.average()"),
    Leaf("sa.average('opt_state')"),
    Leaf("sa.average('buffers')"),
    Leaf("sa.reset(optimizer)"),
    Leaf("sa.bmuf({n}, block_momentum=0.5, nesterov=True)"),
    Leaf("sa.outer_step(optax.adam(0.1))"),
    Leaf("sa.streaming_diloco(4, fragments=2, delay=1, alpha=0.5)"),
    Leaf("sa.gossip(topology='ring')"),
    Leaf("sa.push_sum(drop=0.3)"),
    Leaf("sa.async_diloco({n}, slowest=0.4)"),
    Leaf("sa.muloco({n}, reduce='int4', decay=0.9)", decides=True),
    Leaf("sa.sign_sgd(majority=True)", decides=True),
    Leaf("sa.reduce_with('median')", decides=True),
    Leaf("sa.reduce_with('bf16')", decides=True),
    Leaf("sa.outer_step(optax.sgd(0.5), 'int8')", decides=True),
]
AROUND = [
    "sa.chain({a}, {b})",
    "sa.when({a}, lambda step: step % 2 == 1)",
    "sa.every({a}, {n})",
    "sa.every({a}, 3, offset=1)",
    "sa.every({a}, lambda step: 1 + step // 2)",
    "sa.until({a}, {n})",
    "sa.after({a}, {n})",
    "sa.masked({a}, some_of)",
    "sa.delayed({a}, {n})",
    "sa.delayed({a}, 1, alpha=0.5)",
    "sa.delayed({a}, {n}, arrival='add')",
    "sa.ema({a}, 0.9)",
    "sa.every(sa.decided({a}, asks), {n})",
    "sa.participating({a}, sa.sampled(0.5))",
    "sa.participating({a}, never, stale=True)",
    "sa.paced({a}, [2, 1, 3, 0, 9, 2][:workers])",
    "sa.at_syncs({a}, {b})",
]


SHAPES = [(), (1,), (3,), (0,), (2, 3), (0, 2), (2, 1, 2)]
DTYPES = ["float64", "float64", "float32", "bfloat16"]


class Strategy(NamedTuple):
    """A strategy's expression, and whether any of it decides by values."""

    text: str
    decides: bool


def strategy(draw, most):
    """One with at most so many combinators."""
    if not most or draw.random() < 0.15:
        leaf = draw.choice(LEAVES)
        return Strategy(filled(draw, leaf.text), leaf.decides)
    text, decides = draw.choice(AROUND), False
    for hole in ("{a}", "{b}"):
        if hole in text:
            inner = strategy(draw, draw.randrange(most))
            text = text.replace(hole, inner.text)
            decides |= inner.decides
    return Strategy(filled(draw, text), decides)


def filled(draw, text):
    while "{n}" in text:
        text = text.replace("{n}", str(draw.randint(1, 4)), 1)
    return text


def tree(draw, most):
    """A tree of (shape, dtype), with at most so many nodes above its leaves."""
    if not most:
        return draw.choice([None, *[(draw.choice(SHAPES), draw.choice(DTYPES))] * 4])
    children = [tree(draw, draw.randrange(most)) for _ in range(draw.randint(1, 2))]
    names = dict(zip("ab", children, strict=False))
    return draw.choice([children, names, Held(children)])


def some_of(params):
    """A mask of every other leaf."""
    leaves, form = jax.tree.flatten(params)
    return form.unflatten([i % 2 == 0 for i in range(len(leaves))])


def never(step, workers):
    """A schedule in which worker 0 skips, and at step 1 all do."""
    return (jnp.arange(workers) > 0) & (step != 1)


def asks(replica, state, step):
    """A vote that follows no step: whether its batches were above 0 so far."""
    return replica.buffers > 0


def loss(params, buffers, batch, key):
    """Pulls each entry towards a target of its own, which differs between examples."""
    total, place = 0.0, 1
    for x in map(jnp.asarray, jax.tree.leaves(params)):
        entries = place + jnp.arange(x.size, dtype=float).reshape(x.shape)
        place += x.size
        target = jnp.sin(entries) * batch.reshape(-1, *[1] * x.ndim)
        total += jnp.sum((x - target) ** 2) / len(batch)
    return total, (buffers + jnp.mean(batch), {})


def trained(strategy, params, workers, optimizer, backend):
    """Everything that a run leaves behind: replicas, losses, the center."""
    trainer = sa.DataParallel(
        loss, optimizer, strategy, workers=workers, backend=backend
    )
    state = trainer.init(params, jnp.zeros(()))
    rng = np.random.default_rng(0)
    state, metrics = trainer.run(state, rng.normal(size=(STEPS, BATCH * workers)))
    replica = jax.tree.map(
        lambda x: x.reshape(workers, *x.shape[2:]), state.replica._replace(opt_state=())
    )
    return replica, metrics, trainer.center(state)


def counted(strategy, params, workers):
    """Counts what is sent, or says in a line why that cannot be."""
    replica = sa.Replica(params, optax.sgd(0.1, momentum=0.5).init(params), 0.0)
    try:
        assert (
            sa.communication(strategy, replica, workers=workers, steps=STEPS).calls >= 0
        )
    except ValueError as error:
        assert "\n" not in str(error)


def agree(draw):
    text, decides = strategy(draw, 3)
    shapes = [((2,), draw.choice(DTYPES)), tree(draw, 2)]
    workers, rng = draw.randint(1, 6), np.random.default_rng(draw.getrandbits(32))
    note(f"{text} on {jax.tree.leaves(shapes)}, {workers} workers")
    params = jax.tree.map(
        lambda node: jnp.asarray(rng.normal(size=node[0]), node[1]),
        shapes,
        is_leaf=lambda node: isinstance(node, tuple),
    )
    optimizer = optax.sgd(0.1, momentum=0.5)
    names = {"make": make, "optimizer": optimizer, "workers": workers}
    found = []
    for backend in BACKENDS:
        try:
            made = eval(text, {**globals(), **names})
            found.append(trained(made, params, workers, optimizer, backend))
        except ValueError as error:
            assert "\n" not in str(error), error
            found.append(str(error))
        else:
            if backend == BACKENDS[0]:
                counted(made, params, workers)
    event("refused" if isinstance(found[0], str) else "trained")
    if isinstance(found[0], str):
        assert all(refusal == found[0] for refusal in found)
        return
    dtypes = {str(x.dtype) for x in jax.tree.leaves(params)}
    for other in found[1:]:
        for x, y in zip(*map(jax.tree.leaves, (found[0], other)), strict=True):
            assert (x.shape, x.dtype) == (y.shape, y.dtype)
            if not (decides and dtypes & {"float32", "bfloat16"}):
                bound = max(ROUNDING[name] for name in dtypes)
                x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
                np.testing.assert_allclose(x, y, rtol=bound, atol=bound)


# In many parts: pytest-xdist begins with the files of most tests, and this takes long.
@pytest.mark.parametrize(
    "part",
    [*(pytest.param(n, marks=pytest.mark.slow) for n in range(2))]
    + [pytest.param(n, marks=pytest.mark.long) for n in range(2, 40)],
)
@settings(max_examples=8, deadline=None, derandomize=True, phases=[Phase.generate])
@given(seed=st.integers(0, 2**64))
def test_compositions_agree_on_all_backends_or_are_refused(part, seed):
    with jax.enable_x64(True):
        agree(random.Random(f"{part} {seed}"))
    if next(EXAMPLES) % 50 == 0:  # Linux maps 65,530 areas into a process
        jax.clear_caches()
