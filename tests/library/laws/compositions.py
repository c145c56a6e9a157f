"""Random compositions of strategies, as the text of expressions.

A composition is drawn by the names of `make_names`: the registry's algorithms with the
arguments of `requirements.py`, and all combinators. A new algorithm is drawn as it is.
"""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib
from support.problems.user_nodes import OpaqueNode
from support.requirements import VALUES, make, parameters

import syncalgos as sa


def split_texts(text: str, separator: str = "|") -> list[str]:
    return [item.strip() for item in text.split(separator)]


LR = VALUES["learning_rate"]
MASK = functools.partial(jax.tree.map, lambda x: jnp.ndim(x) > 0)
OPTIMIZERS = {
    "sgd": optax.sgd(LR),
    "momentum": optax.sgd(LR, momentum=0.5),
    "adam": optax.adam(LR),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(LR)),
    "multi": optax.MultiSteps(optax.sgd(LR), 2).gradient_transformation(),
    "prodigy": contrib.prodigy(1.0),
    "masked": optax.chain(optax.sgd(LR), optax.masked(optax.set_to_zero(), MASK)),
    "noisy": optax.noisy_sgd(LR, eta=0.1, gamma=0.0, key=jax.random.key(0)),
}

# What stands for params: an odd tree has a node without leaves, an empty leaf, and one
# in bfloat16, without a gradient.
TREES = {
    "plain": {"a": (), "c": (3, 2)},
    "odd": {"a": (), "c": OpaqueNode([(3, 2), None, (0, 2), (1,)]), "short": (2,)},
}

# Drawn arguments of algorithms that have a parameter of the name.
ARGUMENTS = {
    "period": ["2", "3", "4"],
    "reduce": ["R"],
    "optimizer": ["None", "OPT"],
    "topology": ["'ring'", "'exponential'", "'complete'"],
    "slowest": ["1.0", "0.4"],
}
STRATEGIES = split_texts(
    """average() | outer_step(optax.sgd(1.0)) | outer_step(optax.adam(.1)) |
    outer_step(optax.sgd(.7, momentum=.5)) | outer_step(optax.sgd(1.0), R) |
    reduce_with(R) | average('params', R)"""
)
REDUCERS = split_texts(
    """'mean' | 'median' | 'trimmed' | 'clipped' | 'int8' | reducers.top_k(.3) |
    reducers.random_k(.3) | reducers.sign() | reducers.low_bit(8) |
    reducers.power_sgd(1) | reducers.error_feedback(reducers.top_k(.3)) |
    reducers.ef21(reducers.top_k(.3)) |
    reducers.error_feedback(reducers.random_k(.3)) | reducers.late(reducers.mean())"""
)
WRAPPERS = split_texts(
    """every(X, P) | every(X, 4, offset=1) | every(X, GROWS) | when(X, ODD) |
    until(X, 7) | after(X, 6) | chain(until(sync_sgd(), 6), after(X, 6)) |
    chain(until(X, 8), after(sync_sgd(), 8)) | chain(until(X, 8), after(Y, 8)) |
    at_end(X, 24) | masked(X, PART) | masked(X, ROWS) | delayed(X, 1) |
    delayed(X, 2, arrival='add') | delayed(X, 5, arrival='add') |
    delayed(X, 1, alpha=.5) | delayed(X, 0, alpha=.5) | decided(X, FAR) |
    every(decided(X, FAR), P) | ema(X, .5) | participating(X, FIRST_OUT) |
    participating(X, HEAVY) | participating(X, sampled(.5)) |
    participating(X, FIRST_OUT, stale=True) | participating(X, HEAVY, stale=True) |
    paced(X, SLOW) | paced(X, REST) | at_syncs(X, reset(OPT)) | chain(X, Y) |
    at_syncs(X, average('opt_state')) | at_syncs(X, average('buffers')) |
    chain(X, every(average(), P)) | chain(every(average('opt_state'), P), X)"""
)
NEUTRAL = split_texts(
    """every(X, 1) | chain(X) | chain(X, Strategy()) | chain(Strategy(), X) |
    when(X, ALWAYS) | until(X, 10**6) | after(X, 0) | delayed(X, 0) |
    masked(X, True) | masked(X, WHOLE) | participating(X, ALIKE) |
    participating(X, sampled(1.0)) | participating(X, ALIKE, stale=True) |
    paced(X, ENOUGH) | ema(X, .5) | at_syncs(X, Strategy()) | at_end(X, 10**6)"""
)


def make_names(workers: int, optimizer: str) -> dict[str, Any]:
    """The names of an expression."""
    other_quotas = [9] * (workers - 1)
    return {name: getattr(sa, name) for name in dir(sa) if name[0] != "_"} | {
        **{name: functools.partial(make, name) for name in sa.ALGORITHMS},
        "optax": optax,
        "OPT": OPTIMIZERS[optimizer],
        "PART": functools.partial(jax.tree.map, lambda x: jnp.ndim(x) != 2),
        "ROWS": functools.partial(jax.tree.map, lambda x: mask_rows(x, 2)),
        "WHOLE": functools.partial(jax.tree.map, lambda x: mask_rows(x, None)),
        "FAR": lambda replica, state, step: (
            jnp.abs(jax.tree.leaves(replica.params)[0]).max() > 0.3
        ),
        "ODD": lambda step: step % 2 == 1,
        "ALWAYS": lambda step: step >= 0,
        "GROWS": lambda step: 2 + step // 8,
        "FIRST_OUT": lambda step, n: (jnp.arange(n) > 0) | (n == 1),
        "HEAVY": lambda step, n: 1.0 + (jnp.arange(n) > 0),
        "ALIKE": lambda step, n: jnp.full(n, 3.0),
        "SLOW": [1, *other_quotas],
        "REST": [0, *other_quotas],
        "ENOUGH": [10**6] * workers,
    }


def mask_rows(x: Any, stop: int | None) -> bool | slice:
    """The mask of a leaf: its first rows, if it has any."""
    return slice(0, stop) if jnp.ndim(x) else True


def draw_expression(rng: np.random.Generator, depth: int) -> str:
    """A random composition of so many combinators around one another."""
    if depth:
        inner_expression = draw_expression(rng, depth - 1)
        expression = substitute("X", inner_expression, choose(rng, WRAPPERS))
        expression = substitute("Y", draw_expression(rng, 0), expression)
    elif rng.random() < 0.2:
        expression = choose(rng, STRATEGIES)
    else:
        name = choose(rng, [*sa.ALGORITHMS])
        arguments = []
        for parameter in parameters(name):
            if parameter not in ARGUMENTS:
                continue
            if parameter == "period" or rng.random() < 0.3:
                value = choose(rng, ARGUMENTS[parameter])
                arguments.append(f"{parameter}={value}")
        expression = f"{name}({', '.join(arguments)})"
    expression = substitute("R", choose(rng, REDUCERS), expression)
    return substitute("P", choose(rng, ARGUMENTS["period"]), expression)


def choose(rng: np.random.Generator, texts: list[str]) -> str:
    return str(rng.choice(texts))


def substitute(name: str, text: str, expression: str) -> str:
    """Puts a text in place of a name."""
    return re.sub(rf"\b{name}\b", lambda _: text, expression)


def make_params(kind: str, rng: np.random.Generator) -> Any:
    """Params of a kind."""

    def make_leaf(shape: tuple[int, ...]) -> np.ndarray:
        if shape == TREES["odd"]["short"]:
            return np.zeros(shape, jnp.bfloat16)
        return rng.normal(size=shape)

    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    return jax.tree.map(make_leaf, TREES[kind], is_leaf=is_shape)
