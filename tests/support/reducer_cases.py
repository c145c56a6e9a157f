"""Reducers to test, updates to give them, their results, and training along inputs.

Leaves are (steps, workers, *shape), in what goes in and in what comes out. Collectives
run over the lanes of one device, and over devices where backends are compared.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from support.mapped_workers import on_workers
from support.plain_loop import local_steps
from syncalgos import Replica, reducers
from syncalgos._engine.placement.make_layout import Placement, make_layout

# Float32 rounds at 6e-8; sums of a few dozen products, in whatever order, stay below
# this share of the largest entry.
CLOSE = 2e-6


def tables(tree):
    return {name: name == "matrix" and "a table" for name in tree}


REDUCERS = {
    "mean": reducers.mean(),
    "bf16": reducers.bf16(),
    "int4": reducers.quantized(4),
    "sign": reducers.sign(),
    "majority": reducers.sign(majority=True),
    "tally": reducers.tally(),
    "top_k": reducers.top_k(0.3),
    "top_k-int4": reducers.top_k(0.3, bits=4),
    "random_k": reducers.random_k(0.3),
    "row_sparse": reducers.row_sparse(27, tables=tables),
    "power_sgd": reducers.power_sgd(2, min_rate=0),
    "median": reducers.median(),
    "trimmed": reducers.trimmed(0.2),
    "clipped": reducers.clipped(2.0),
    "low_bit": reducers.low_bit(),
    "ef21": reducers.ef21(reducers.top_k(0.3)),
}
UNFED = [n for n, reducer in REDUCERS.items() if not reducer.takes_feedback]
ROBUST = ["median", "trimmed", "clipped"]
VOTES = ["majority", "tally"]  # which tell no more than signs
# `combined` is the mean of all `sent`, as Reducer.combine promises, but for those that
# round that mean once more, a vote, which is no mean, and the robust ones.
EXACT = [n for n in REDUCERS if n not in ("bf16", "int4", "majority", *UNFED)]

SHAPES = {"empty": (0, 3), "matrix": (27, 19), "scalar": ()}
# The steps of `reduced` whose updates are not random.
ZEROS = 3
SPOILED = 4


def run(reducer, updates, steps=None, backend="vmap", devices=1):
    """Combines step by step; returns (combined, sent, state), the state after each."""
    count, workers = jax.tree.leaves(updates)[0].shape[:2]
    layout = make_layout(workers, backend, Placement(range(devices)))
    steps = jnp.array(range(count) if steps is None else steps)

    def program(updates, steps):
        def combine_step(state, inputs):
            step, grads = inputs
            combined, decoded, state = reducer.combine(grads, state, step)
            return state, (combined, decoded, state)

        state = reducer.init(jax.tree.map(lambda x: x[0], updates))
        return lax.scan(combine_step, state, (steps, updates))[1]

    def lay_out(x):
        return np.moveaxis(x, 0, 1).reshape(*layout.shape, count, *x.shape[2:])

    def collect(x):
        return np.moveaxis(np.asarray(x).reshape(workers, count, *x.shape[3:]), 0, 1)

    lane_updates = jax.tree.map(lay_out, updates)
    result = on_workers(layout, program, lane_updates, steps)
    return jax.tree.map(collect, jax.block_until_ready(result))


def of_gradients(strategy):
    """The reducer that a strategy applies to gradients."""

    def combine(updates, state, step):
        combined, state = strategy.reduce(updates, Replica(updates), state, step)
        return combined, updates, state

    return reducers.Reducer(combine, strategy.init)


def side_by_side(several):
    """A reducer that does what each of several does: compiled once for all."""

    def combine(updates, state, step):
        combined = {}
        decoded = {}
        new_state = {}
        for name, reducer in several.items():
            result = reducer.combine(updates, state[name], step)
            combined[name], decoded[name], new_state[name] = result
        return combined, decoded, new_state

    def init(params):
        return {n: r.init(params) for n, r in several.items()}

    return reducers.Reducer(combine, init)


def normal(shape, steps=1, workers=3, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(steps, workers, *shape)).astype(np.float32)


def normal_tree(steps=1, workers=3, **shapes):
    return {
        name: normal(shape, steps, workers, seed)
        for seed, (name, shape) in enumerate(shapes.items())
    }


@functools.cache
def reduced(name):
    """Returns updates, combined, sent, and the states.

    Updates are random, then zeros, then one entry of worker 1 is NaN, then random.
    """
    updates = normal_tree(6, **SHAPES)
    for x in updates.values():
        x[ZEROS] = 0
    updates["matrix"][SPOILED, 1, 0, 0] = np.nan
    updates["count"] = np.arange(72, dtype=np.int32).reshape(6, 3, 2, 2)
    return updates, *run(REDUCERS[name], updates)


def outcome(name):
    """Returns updates, combined and sent."""
    return reduced(name)[:3]


def each_leaf(*trees):
    """The floats of several trees side by side: (steps, workers, size) in float64."""
    for name in trees[0]:
        if name not in ("count", "empty"):
            leaves = [np.float64(tree[name][:SPOILED]) for tree in trees]
            yield [x.reshape(*x.shape[:2], -1) for x in leaves]


def mean_over_workers(x):
    x = np.float64(x)
    return np.broadcast_to(x.mean(1, keepdims=True), x.shape)


def means(updates):
    return jax.tree.map(mean_over_workers, updates)


def assert_close(actual, expected, tolerance=CLOSE):
    """Compares to a share of the largest entry of a leaf."""

    def compare(x, y):
        size = np.max(np.abs(y), initial=0)
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * size)

    jax.tree.map(compare, *(jax.tree.map(np.float64, t) for t in (actual, expected)))


def assert_neighbours(rounded, exact, levels):
    """Rounded to one of the levels next to it, whose scale the last axis shares."""
    unit = np.max(np.abs(exact), axis=-1, keepdims=True) / levels
    level = rounded / np.where(unit > 0, unit, 1)
    # Float32 is some ulps off: 127, times 2, 7 or so times 6e-8.
    np.testing.assert_allclose(level, np.round(level), rtol=0, atol=1e-4)
    assert (np.abs(rounded - exact) <= unit * (1 + 1e-4)).all()


def param_shapes(init):
    """The shapes of the params that `init` of a model makes from a key."""
    shapes = jax.eval_shape(init, jax.random.key(0))
    return shapes[0] if isinstance(shapes, tuple) else shapes


def wave(*shape, phase=0.0):
    """Numbers in -1 … 1 of no short period, the same in any library."""
    numbers = np.arange(int(np.prod(shape)))
    return np.sin(0.7 * numbers**2 + phase).reshape(shape).astype(np.float32)


def descend(strategy, optimizer, starts, gradient, inputs):
    """Trains in a loop of its own; returns params after each step.

    Leaves of starts, a worker's params, are (workers, …), of inputs (steps, workers,
    …), of what comes back (steps, workers, …). gradient: (params, inputs) -> grads.
    """

    def worker(params, inputs):
        start = Replica(params, optimizer.init(params)), strategy.init(params)
        trained, _ = local_steps(strategy, optimizer, gradient, start, inputs)
        return trained.params

    lanes = jax.vmap(worker, in_axes=(0, 1), out_axes=1, axis_name="lanes")
    lead = jax.tree.map(lambda x: x[None], (starts, inputs))
    return jax.tree.map(
        lambda x: np.asarray(x[0]), jax.jit(jax.vmap(lanes, axis_name="devices"))(*lead)
    )


def follow(strategy, optimizer, starts, grads):
    """Params after each step along given gradients, (steps, workers, …)."""
    return descend(strategy, optimizer, starts, lambda _, step_grads: step_grads, grads)
