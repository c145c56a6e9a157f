"""The moments of each optimizer of optax, which DES-LOC averages."""

from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest
from optax import contrib

from syncalgos.combinators.moments import map_moments


class Encoder(NamedTuple):
    """Params whose names are those of moments, as a variational autoencoder's."""

    mu: Any
    nu: Any


PARAMS = Encoder(mu=np.ones((4, 3), np.float32), nu={"trace": np.ones(3, np.float32)})
CENTERED = {"centered": True, "bias_correction": True}
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))

# The fields of the first moments, and of the second ones.
OPTIMIZERS = {
    "plain": (optax.sgd(0.1), "", ""),
    "sgd": (optax.sgd(0.1, momentum=0.9), "trace", ""),
    "adam": (optax.adam(0.1), "mu", "nu"),
    "amsgrad": (optax.amsgrad(0.1), "mu", "nu nu_max"),
    "adabelief": (optax.adabelief(0.1), "mu", "nu"),
    "lion": (optax.lion(0.1), "mu", ""),
    "novograd": (optax.novograd(0.1), "mu", "nu"),
    "rmsprop": (optax.rmsprop(0.1, centered=True), "mu", "nu"),
    "corrected": (
        optax.rmsprop(0.1, momentum=0.9, bias_correction=True),
        "trace",
        "nu",
    ),
    "corrected, centered": (optax.rmsprop(0.1, **CENTERED), "mu", "nu"),
    "adagrad": (optax.adagrad(0.1), "", "sum_of_squares"),
    "adadelta": (optax.adadelta(0.1), "", "e_g e_x"),
    "adafactor": (optax.adafactor(0.1), "", "v v_col v_row"),
    "sm3": (optax.sm3(0.1), "nu", "mu"),
    "adan": (optax.adan(0.1), "m v", "n"),
    "ademamix": (contrib.ademamix(0.1), "m1 m2", "nu"),
    "simplified": (contrib.simplified_ademamix(0.1), "m", "n"),
    "muon": (contrib.muon(0.1), "mu", "nu"),
    "prodigy": (contrib.prodigy(0.1), "exp_avg", "exp_avg_sq"),
    "dadapt": (contrib.dadapt_adamw(0.1), "exp_avg", "exp_avg_sq"),
    "ema": (optax.ema(0.9), "ema", ""),
    "in another": (optax.apply_if_finite(CLIPPED, 3), "mu", "nu"),
}


def changed(order, opt_state):
    """The fields of the state that are changed as moments of this order."""
    moved = map_moments(order, lambda m: jax.tree.map(lambda x: x + 1, m), opt_state)
    fields = set()
    for (path, x), y in zip(
        jax.tree.leaves_with_path(opt_state), jax.tree.leaves(moved), strict=True
    ):
        # Behind the field of the state, those of params.
        names = [key.name for key in path if hasattr(key, "name")]
        own = names[: -1 if names[-1] in Encoder._fields and len(names) > 1 else None]
        if not np.array_equal(x, y):
            fields.add(own[-1])
    return fields


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_first_and_second_moments_are_told_apart(name):
    optimizer, first, second = OPTIMIZERS[name]
    opt_state = optimizer.init(PARAMS)
    assert changed(1, opt_state) == set(first.split())
    assert changed(2, opt_state) == set(second.split())
