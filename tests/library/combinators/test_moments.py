"""The moments of each optimizer of optax, which DES-LOC averages."""

import ast
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from syncalgos import _optax_states
from syncalgos._combinators.primitives import restart_opt_state
from syncalgos._optax_states import map_moments


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
    "momo": (contrib.momo(), "exp_avg", ""),
    "momo_adam": (contrib.momo_adam(), "exp_avg", "exp_avg_sq"),
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


SCHEDULE = optax.linear_schedule(1.0, 0.0, 10)
MOMENTUM = optax.sgd(SCHEDULE, momentum=0.9)
PLATEAU = contrib.reduce_on_plateau(factor=0.5, patience=2)
DECAYED = optax.adamw(0.1, weight_decay=SCHEDULE)
TWICE = optax.MultiSteps(MOMENTUM, 2).gradient_transformation()

# The fields of an optimizer's state that a reset restarts, and others that it keeps.
RESTARTS = {
    "prodigy": (contrib.prodigy(), "", "exp_avg estim_lr params0 count"),
    "dadapt": (contrib.dadapt_adamw(), "", "exp_avg_sq estim_lr grad_sum count"),
    "momo": (contrib.momo(), "", "exp_avg lb count"),
    "momo_adam": (contrib.momo_adam(), "", "lb count"),
    "dog": (contrib.dog(1.0), "", "init_params max_dist"),
    "dowg": (contrib.dowg(1.0), "", "init_params estim_sq_dist"),
    "cocob": (contrib.cocob(), "", "reward"),
    "madgrad": (contrib.madgrad(0.1), "", "x0 s count"),
    "ademamix": (contrib.ademamix(0.1), "m1 m2 nu count[0]", "count_m2"),
    "rprop": (optax.rprop(0.1), "", "step_sizes"),
    "mechanic": (contrib.mechanize(optax.adam(0.1)), "mu nu", "x0 s r v"),
    "finite": (optax.apply_if_finite(optax.adam(0.1), 3), "mu nu", "total_notfinite"),
    "chain": (optax.chain(optax.adam(0.1), contrib.prodigy()), "mu nu", "estim_lr"),
    "noise": (optax.noisy_sgd(0.1, key=0), "", "count rng_key"),
    "schedule": (MOMENTUM, "trace", "count"),
    "decay and losses": (optax.chain(DECAYED, PLATEAU), "mu nu", "[1].count scale"),
    "injected": (
        optax.inject_hyperparams(optax.sgd)(SCHEDULE, momentum=0.9),
        "trace",
        "count hyperparams_states",
    ),
    "condition": (
        optax.transforms.conditionally_transform(
            MOMENTUM, lambda step: jnp.less(step, 3)
        ),
        "trace",
        "step",
    ),
    "masking condition": (
        optax.transforms.conditionally_mask(MOMENTUM, lambda step: jnp.less(step, 3)),
        "trace",
        "step",
    ),
    "accumulated": (TWICE, "trace", "mini_step gradient_step acc_grads"),
    "summed": (optax.apply_every(3), "", "count grad"),
}


@pytest.mark.parametrize("name", RESTARTS)
def test_a_reset_restarts_momenta_and_keeps_measurements(name):
    optimizer, restarted, kept = RESTARTS[name]
    new = optimizer.init(PARAMS)

    def later(x):
        return jax.random.split(x)[0] if is_key(x) else x + 1

    old = jax.tree.map(later, new)
    paths = jax.tree_util.tree_leaves_with_path(new)
    changed = {"new": "", "old": ""}
    for (path, x), y in zip(
        paths, jax.tree.leaves(restart_opt_state(new, old)), strict=True
    ):
        changed["new" if np.array_equal(data(x), data(y)) else "old"] += keystr(path)
    for source, fields in (("new", restarted), ("old", kept)):
        for field in fields.split():
            assert re.search(rf"\W{re.escape(field)}", changed[source]), field


keystr = jax.tree_util.keystr


def is_key(x):
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def data(x):
    return jax.random.key_data(x) if is_key(x) else x


TABLES = [x for name, x in vars(_optax_states).items() if name.isupper()]
NAMED = set().union(*(x for x in TABLES if not isinstance(x, str)))


def test_states_have_the_names_of_the_installed_optax():
    modules = [x for name, x in sys.modules.items() if name.startswith("optax.")]
    held = {name: x for module in modules for name, x in vars(module).items()}
    assert {*held} >= NAMED
    sole = [*_optax_states.AROUND.items(), *_optax_states.COUNTED.items()]
    fields = [(name, (field,)) for name, field in sole]
    fields += [(name, sum(x, ())) for name, x in _optax_states.MOMENTS.items()]
    for name, wanted in fields:
        assert {*wanted} <= {*held[name]._fields}, name


def test_one_file_alone_names_states_of_optax():
    library = Path(_optax_states.__file__).parent
    for path in {*library.rglob("*.py")} - {Path(_optax_states.__file__)}:
        nodes = ast.walk(ast.parse(path.read_text()))
        texts = {x.value for x in nodes if isinstance(x, ast.Constant)}
        assert not NAMED & texts, path
