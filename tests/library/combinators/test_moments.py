"""Moments of each optimizer that DES-LOC averages, and when."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from syncalgos import DataParallel, des_loc, stateless


class Encoder(NamedTuple):
    """Params whose names are those of moments, as a variational autoencoder's."""

    mu: Any
    nu: Any


PARAMS = Encoder(mu=np.ones((4, 3), np.float32), nu={"trace": np.ones(3, np.float32)})
BATCHES = np.random.default_rng(0).normal(size=(2, 6, 4)).astype(np.float32)


def loss(params, x):
    return jnp.mean((x @ params.mu + params.nu["trace"]) ** 2)


# The fields of the first moments, and of the second ones.
OPTIMIZERS = {
    "sgd": (optax.sgd(0.1, momentum=0.9), {"trace"}, set()),
    "adam": (optax.adam(0.1), {"mu"}, {"nu"}),
    "amsgrad": (optax.amsgrad(0.1), {"mu"}, {"nu", "nu_max"}),
    "adabelief": (optax.adabelief(0.1), {"mu"}, {"nu"}),
    "lion": (optax.lion(0.1), {"mu"}, set()),
    "rmsprop": (optax.rmsprop(0.1, centered=True), {"mu"}, {"nu"}),
    "corrected": (
        optax.rmsprop(0.1, momentum=0.9, bias_correction=True),
        {"trace"},
        {"nu"},
    ),
    "corrected, centered": (
        optax.rmsprop(0.1, centered=True, bias_correction=True),
        {"mu"},
        {"nu"},
    ),
    "adagrad": (optax.adagrad(0.1), set(), {"sum_of_squares"}),
    "adadelta": (optax.adadelta(0.1), set(), {"e_g", "e_x"}),
    "adafactor": (
        optax.adafactor(0.1, min_dim_size_to_factor=2),
        set(),
        {"v_row", "v_col", "v"},
    ),
    "sm3": (optax.sm3(0.1), {"nu"}, {"mu"}),
    "adan": (optax.adan(0.1), {"m", "v"}, {"n"}),
    "ademamix": (contrib.ademamix(0.1), {"m1", "m2"}, {"nu"}),
    "simplified": (contrib.simplified_ademamix(0.1), {"m"}, {"n"}),
    "muon": (contrib.muon(0.1), {"mu"}, {"nu"}),
    "prodigy": (contrib.prodigy(0.1), {"exp_avg"}, {"exp_avg_sq"}),
    "in another": (
        optax.apply_if_finite(
            optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)), 3
        ),
        {"mu"},
        {"nu"},
    ),
}


def apart(optimizer, strategy):
    """The fields of the optimizer's state in which workers differ after two steps."""
    trainer = DataParallel(
        stateless(loss), optimizer, strategy, workers=3, backend="vmap"
    )
    state, _ = trainer.run(trainer.init(PARAMS), BATCHES)
    leaves = jax.tree_util.tree_leaves_with_path(state.replica.opt_state)
    fields = set()
    for path, x in leaves:
        names = [key.name for key in path if hasattr(key, "name")]
        own = names[: -1 if names[-1] in Encoder._fields and len(names) > 1 else None]
        values = np.asarray(x, np.float64).reshape(3, -1)
        if np.ptp(values, axis=0).max(initial=0) > 1e-7 * np.abs(values).max(initial=0):
            fields.add(own[-1])
    return fields


@pytest.mark.sample(1, slow=9)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_first_and_second_moments_are_averaged_at_their_own_periods(name):
    optimizer, first, second = OPTIMIZERS[name]
    everything = apart(optimizer, des_loc(99, first_period=99, second_period=99))
    assert first | second <= everything
    assert (
        apart(optimizer, des_loc(99, first_period=2, second_period=99))
        == everything - first
    )
    assert (
        apart(optimizer, des_loc(99, first_period=99, second_period=2))
        == everything - second
    )


def test_an_optimizer_without_moments_is_local_sgd():
    assert apart(optax.sgd(0.1), des_loc(2)) == set()


@pytest.mark.parametrize(
    "optimizer, name",
    [(contrib.madgrad(0.1), "MadgradState"), (contrib.cocob(), "COCOBState")],
)
def test_an_optimizer_whose_moments_are_not_known_is_refused(optimizer, name):
    trainer = DataParallel(
        stateless(loss), optimizer, des_loc(4), workers=3, backend="vmap"
    )
    with pytest.raises(ValueError, match=rf"state \({name}\) has no moments that"):
        trainer.init(PARAMS)
