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


class MomentFields(NamedTuple):
    """An optimizer, and the fields of its state that hold moments.

    Attributes:
        optimizer: of optax.
        first_fields: the names of the first moments' fields, with spaces between.
        second_fields: those of the second moments.
    """

    optimizer: optax.GradientTransformation
    first_fields: str
    second_fields: str


OPTIMIZERS = {
    "plain": MomentFields(optax.sgd(0.1), "", ""),
    "sgd": MomentFields(optax.sgd(0.1, momentum=0.9), "trace", ""),
    "adam": MomentFields(optax.adam(0.1), "mu", "nu"),
    "amsgrad": MomentFields(optax.amsgrad(0.1), "mu", "nu nu_max"),
    "adabelief": MomentFields(optax.adabelief(0.1), "mu", "nu"),
    "lion": MomentFields(optax.lion(0.1), "mu", ""),
    "novograd": MomentFields(optax.novograd(0.1), "mu", "nu"),
    "rmsprop": MomentFields(optax.rmsprop(0.1, centered=True), "mu", "nu"),
    "corrected": MomentFields(
        optax.rmsprop(0.1, momentum=0.9, bias_correction=True),
        "trace",
        "nu",
    ),
    "corrected, centered": MomentFields(optax.rmsprop(0.1, **CENTERED), "mu", "nu"),
    "adagrad": MomentFields(optax.adagrad(0.1), "", "sum_of_squares"),
    "adadelta": MomentFields(optax.adadelta(0.1), "", "e_g e_x"),
    "adafactor": MomentFields(optax.adafactor(0.1), "", "v v_col v_row"),
    "sm3": MomentFields(optax.sm3(0.1), "nu", "mu"),
    "adan": MomentFields(optax.adan(0.1), "m v", "n"),
    "ademamix": MomentFields(contrib.ademamix(0.1), "m1 m2", "nu"),
    "simplified": MomentFields(contrib.simplified_ademamix(0.1), "m", "n"),
    "muon": MomentFields(contrib.muon(0.1), "mu", "nu"),
    "prodigy": MomentFields(contrib.prodigy(0.1), "exp_avg", "exp_avg_sq"),
    "dadapt": MomentFields(contrib.dadapt_adamw(0.1), "exp_avg", "exp_avg_sq"),
    "momo": MomentFields(contrib.momo(), "exp_avg", ""),
    "momo_adam": MomentFields(contrib.momo_adam(), "exp_avg", "exp_avg_sq"),
    "ema": MomentFields(optax.ema(0.9), "ema", ""),
    "in another": MomentFields(optax.apply_if_finite(CLIPPED, 3), "mu", "nu"),
}


def find_moment_fields(order: int, opt_state: Any) -> set[str]:
    """The fields of the state that are changed as moments of this order."""
    moved = map_moments(order, lambda m: jax.tree.map(lambda x: x + 1, m), opt_state)
    fields = set()
    for (path, x), y in zip(
        jax.tree.leaves_with_path(opt_state), jax.tree.leaves(moved), strict=True
    ):
        names = [key.name for key in path if hasattr(key, "name")]
        if len(names) > 1 and names[-1] in Encoder._fields:
            names.pop()  # behind the field of the state, that of params
        if not np.array_equal(x, y):
            fields.add(names[-1])
    return fields


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_first_and_second_moments_are_told_apart(name):
    fields = OPTIMIZERS[name]
    opt_state = fields.optimizer.init(PARAMS)
    assert find_moment_fields(1, opt_state) == set(fields.first_fields.split())
    assert find_moment_fields(2, opt_state) == set(fields.second_fields.split())


SCHEDULE = optax.linear_schedule(1.0, 0.0, 10)
MOMENTUM = optax.sgd(SCHEDULE, momentum=0.9)
PLATEAU = contrib.reduce_on_plateau(factor=0.5, patience=2)
DECAYED = optax.adamw(0.1, weight_decay=SCHEDULE)
TWICE = optax.MultiSteps(MOMENTUM, 2).gradient_transformation()


class ResetFields(NamedTuple):
    """An optimizer, and what a reset does to the fields of its state.

    Attributes:
        optimizer: of optax.
        restarted_fields: those that a reset restarts, with spaces between.
        kept_fields: those that it keeps.
    """

    optimizer: Any
    restarted_fields: str
    kept_fields: str


RESTARTS = {
    "prodigy": ResetFields(contrib.prodigy(), "", "exp_avg estim_lr params0 count"),
    "dadapt": ResetFields(
        contrib.dadapt_adamw(), "", "exp_avg_sq estim_lr grad_sum count"
    ),
    "momo": ResetFields(contrib.momo(), "", "exp_avg lb count"),
    "momo_adam": ResetFields(contrib.momo_adam(), "", "lb count"),
    "dog": ResetFields(contrib.dog(1.0), "", "init_params max_dist"),
    "dowg": ResetFields(contrib.dowg(1.0), "", "init_params estim_sq_dist"),
    "cocob": ResetFields(contrib.cocob(), "", "reward"),
    "madgrad": ResetFields(contrib.madgrad(0.1), "", "x0 s count"),
    "ademamix": ResetFields(contrib.ademamix(0.1), "m1 m2 nu count[0]", "count_m2"),
    "rprop": ResetFields(optax.rprop(0.1), "", "step_sizes"),
    "mechanic": ResetFields(contrib.mechanize(optax.adam(0.1)), "mu nu", "x0 s r v"),
    "finite": ResetFields(
        optax.apply_if_finite(optax.adam(0.1), 3), "mu nu", "total_notfinite"
    ),
    "chain": ResetFields(
        optax.chain(optax.adam(0.1), contrib.prodigy()), "mu nu", "estim_lr"
    ),
    "noise": ResetFields(optax.noisy_sgd(0.1, key=0), "", "count rng_key"),
    "schedule": ResetFields(MOMENTUM, "trace", "count"),
    "decay and losses": ResetFields(
        optax.chain(DECAYED, PLATEAU), "mu nu", "[1].count scale"
    ),
    "injected": ResetFields(
        optax.inject_hyperparams(optax.sgd)(SCHEDULE, momentum=0.9),
        "trace",
        "count hyperparams_states",
    ),
    "condition": ResetFields(
        optax.transforms.conditionally_transform(
            MOMENTUM, lambda step: jnp.less(step, 3)
        ),
        "trace",
        "step",
    ),
    "masking condition": ResetFields(
        optax.transforms.conditionally_mask(MOMENTUM, lambda step: jnp.less(step, 3)),
        "trace",
        "step",
    ),
    "accumulated": ResetFields(TWICE, "trace", "mini_step gradient_step acc_grads"),
    "summed": ResetFields(optax.apply_every(3), "", "count grad"),
}


@pytest.mark.parametrize("name", RESTARTS)
def test_a_reset_restarts_momenta_and_keeps_measurements(name):
    optimizer, restarted_fields, kept_fields = RESTARTS[name]
    first_state = optimizer.init(PARAMS)
    late_state = jax.tree.map(change_leaf, first_state)
    reset_state = restart_opt_state(first_state, late_state)
    paths_restarted = ""
    paths_kept = ""
    for (path, first_leaf), leaf in zip(
        jax.tree.leaves_with_path(first_state),
        jax.tree.leaves(reset_state),
        strict=True,
    ):
        if np.array_equal(make_comparable(first_leaf), make_comparable(leaf)):
            paths_restarted += jax.tree_util.keystr(path)
        else:
            paths_kept += jax.tree_util.keystr(path)
    for field in restarted_fields.split():
        assert re.search(rf"\W{re.escape(field)}", paths_restarted), field
    for field in kept_fields.split():
        assert re.search(rf"\W{re.escape(field)}", paths_kept), field


def change_leaf(x: jax.Array) -> jax.Array:
    return jax.random.split(x)[0] if is_key(x) else x + 1


def is_key(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def make_comparable(x: jax.Array) -> jax.Array:
    return jax.random.key_data(x) if is_key(x) else x


TABLES = [x for name, x in vars(_optax_states).items() if name.isupper()]
STATE_NAMES = set().union(*(x for x in TABLES if not isinstance(x, str)))


def test_states_have_the_names_of_the_installed_optax():
    optax_values = {}
    for module_name, module in sys.modules.items():
        if module_name.startswith("optax."):
            optax_values |= vars(module)
    assert {*optax_values} >= STATE_NAMES
    sole = [*_optax_states.AROUND.items(), *_optax_states.COUNTED.items()]
    fields = [(name, (field,)) for name, field in sole]
    fields += [(name, sum(x, ())) for name, x in _optax_states.MOMENTS.items()]
    for name, wanted in fields:
        assert {*wanted} <= {*optax_values[name]._fields}, name


def test_one_file_alone_names_states_of_optax():
    library = Path(_optax_states.__file__).parent
    for path in {*library.rglob("*.py")} - {Path(_optax_states.__file__)}:
        nodes = ast.walk(ast.parse(path.read_text()))
        texts = {x.value for x in nodes if isinstance(x, ast.Constant)}
        assert not STATE_NAMES & texts, path
