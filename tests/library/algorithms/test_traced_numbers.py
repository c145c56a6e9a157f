"""A strategy's numbers as data: one program for all their values, and its gradients."""

import functools
import typing
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from support.chosen_tests import chosen_values, split_around
from support.problems import quadratics, relative_error
from support.requirements import PERIOD, WITH, make, other_value, parameters
from support.tiers import tiers

import syncalgos as sa
from syncalgos import reducers

pytestmark = pytest.mark.usefixtures("float64")

STEPS = 2 * PERIOD + 2
ROUNDING = 1e-12  # of float64, relative
NAMES = tuple(sa.ALGORITHMS)


def is_taken(name, number, value):
    """Whether an algorithm may be made with a traced number."""
    try:
        jax.eval_shape(lambda x: (make(name, **{number: x}), 0)[1], value)
    except ValueError:
        return False
    return True


def rates_of(name):
    """The arguments of an algorithm that are rates, floats or seeds."""
    hints = typing.get_type_hints(sa.ALGORITHMS[name])
    floats = [
        k for k, kind in hints.items() if float in (typing.get_args(kind) or (kind,))
    ]
    return (*floats, "seed") if "seed" in hints else (*floats,)


def numbers_of(name):
    """Those of them that may be traced."""
    return tuple(
        argument
        for argument in rates_of(name)
        if is_taken(name, argument, 1 if argument == "seed" else 0.5)
    )


NUMBERS = {name: numbers_of(name) for name in NAMES}
WITH_NUMBERS = [name for name in NAMES if NUMBERS[name]]

# Numbers that move results by jumps, between which they change nothing.
JUMPS = {
    ("fedavg", "fraction"): "how many workers take part",
    ("qsr", "growth"): "which steps sync",
    ("qsr", "learning_rate"): "which steps sync",
    ("dynamic_averaging", "bound"): "which steps sync",
    ("edit", "threshold"): "which norms are usual",
    ("edit", "forgetting"): "which norms are usual",
    ("async_diloco", "slowest"): "at which steps a worker trains",
    ("decoupled_diloco", "slowest"): "at which steps a worker trains",
    ("heloco", "slowest"): "at which steps a worker trains",
    ("halos", "slowest"): "at which steps a worker trains",
    ("push_sum", "drop"): "which messages are lost",
    ("demo", "decay"): "signs",
    ("demo", "learning_rate"): "signs",
    ("signum", "local_momentum"): "signs",
    ("distributed_lion", "b1"): "signs",
    ("distributed_lion", "b2"): "signs",
}


def settings(name):
    """Other arguments, with which the numbers matter."""
    sets = [WITH.get((name, number), {}) for number in NUMBERS[name]]
    merged = functools.reduce(dict.__or__, sets, {})
    return {k: v for k, v in merged.items() if k not in NUMBERS[name]}


def values(name):
    """Two legal values of each number: all of the first, all of the second."""
    first = {}
    second = {}
    for number in NUMBERS[name]:
        other = other_value(name, number)
        other = 0.05 if callable(other) else other  # no schedule
        usual = parameters(name)[number]
        first[number] = other / 2 if usual is None else usual
        second[number] = other
    return first, second


def arrays(numbers):
    """The numbers as a program's own: strongly typed, as no Python number is."""

    def array(x):
        return jnp.asarray(x, jnp.int32 if isinstance(x, int) else float)

    return jax.tree.map(array, numbers)


def centers_of(strategy):
    """All workers' centers after each step, (workers, steps, size)."""
    start, curvature, minimum, noise = quadratics.make_worker_inputs(steps=STEPS)
    # One leaf and some entries of another have no gradient: norms and moments of 0.
    for tree in curvature, noise:
        tree["head"]["scale"] *= 0
        tree["body"]["kernel"] = tree["body"]["kernel"].at[..., 0, :].set(0)
    _, centers = quadratics.program(strategy)([start, curvature, minimum, noise])
    leaves = [x.reshape(4, STEPS, -1) for x in jax.tree.leaves(centers)]
    return jnp.concatenate(leaves, axis=-1)


COMBINED = {
    "outer_step": (
        lambda x: sa.every(sa.outer_step(optax.sgd(x, momentum=x, nesterov=True)), 4)
    ),
    "ema": lambda x: sa.ema(sa.model_averaging(4), x),
    "delayed": lambda x: sa.delayed(sa.diloco(4), 2, alpha=x),
    "sampled": lambda x: sa.participating(sa.diloco(4), sa.sampled(x, seed=3)),
    "participating": (
        lambda x: sa.participating(sa.diloco(4), lambda step, n: 1 + x * jnp.arange(n))
    ),
    "at_end": lambda x: sa.at_end(sa.qsr(2, growth=x, learning_rate=0.1), STEPS),
    "schedule": lambda x: sa.every(sa.average(), lambda step: 1 + x * step),
    "decided": (
        lambda x: sa.decided(
            sa.average(), lambda own, *_: jnp.std(own.params["body"]["bias"]) > x
        )
    ),
    "clipped": lambda x: sa.reduce_with(reducers.clipped(x)),
    "error_feedback": (
        lambda x: sa.reduce_with(reducers.error_feedback(reducers.top_k(0.3), decay=x))
    ),
}


class Case(NamedTuple):
    """Makes something of numbers.

    Attributes:
        make: numbers by name -> a strategy.
        values: two legal ones of each number.
        jumps: numbers that move results by jumps, and of which no gradient is asked.
    """

    make: Callable[[Any], sa.Strategy]
    values: tuple[dict[str, Any], dict[str, Any]]
    jumps: frozenset[str] = frozenset()


def case(name):
    if name in COMBINED:
        both = {"x": 0.3}, {"x": 0.8}
        return Case(lambda own: COMBINED[name](own["x"]), both)
    jumps = {number for number in NUMBERS[name] if (name, number) in JUMPS}
    return Case(
        lambda own: make(name, **settings(name), **own),
        values(name),
        frozenset({*jumps, "seed"}),
    )


class Program:
    """The training of several cases, compiled once for all values of their numbers."""

    def __init__(self, names):
        self.cases = {name: case(name) for name in names}
        self.compiled = jax.jit(self._centers)
        first, self.second = (
            {name: each.values[i] for name, each in self.cases.items()} for i in (0, 1)
        )
        self.centers = self.compiled(arrays(self.second))
        self.usual = self.compiled(arrays(first))
        self.python = jax.jit(lambda: self._centers(self.second))()
        self.gradients = jax.jit(jax.grad(self._ends))(arrays(self._smooth()))

    def _centers(self, numbers):
        return {k: centers_of(x.make(numbers[k])) for k, x in self.cases.items()}

    def _smooth(self):
        """The numbers that have a gradient, of the second values."""
        return {
            name: {k: float(x) for k, x in own.items() if k != "seed"}
            for name, own in self.second.items()
            if name in NUMBERS
        }

    def _ends(self, smooth):
        merged = {k: own | smooth.get(k, {}) for k, own in arrays(self.second).items()}
        return sum(jnp.sum(x[:, -1] ** 2) for x in self._centers(merged).values())

    def slope(self, name, number):
        """The difference quotient of a case's end."""
        value = self.second[name][number]
        apart = 1e-6 * value
        ends = []
        for at in (value + apart, value - apart):
            moved = {**self.second, name: {**self.second[name], number: at}}
            ends.append(float(jnp.sum(self.compiled(arrays(moved))[name][:, -1] ** 2)))
        return (ends[0] - ends[1]) / (2 * apart)


# Rates of means and momenta, a seed, medians of norms, a table, data-dependent steps.
SOME = ("bmuf", "quantized_sgd", "edit")
# Shares of workers, schedules, factors.
SOME += ("fedavg", "qsr", "powersgd", *COMBINED)
# A mean, a block momentum, weights, servers, bits: each takes its numbers another way.
PLAIN = ("sync_sgd", "bmuf", "fedavg", "decoupled_diloco", "quantized_sgd")
TOGETHER = 6
CASES = [*WITH_NUMBERS, *COMBINED]


@pytest.fixture(scope="module")
def program_of(request):
    """name -> the program that its case shares with others of the session's tests."""
    names = chosen_values(request, "name")
    done = {}

    def of(name):
        if name not in done:
            together = split_around(name, names, TOGETHER)
            done.update(dict.fromkeys(together, Program(together)))
        return done[name]

    return of


@pytest.mark.parametrize("name", tiers(CASES, slow=SOME))
def test_one_program_serves_all_values_and_has_their_gradients(name, program_of):
    program = program_of(name)
    centers = program.centers[name]
    assert relative_error(centers, program.python[name]) <= ROUNDING
    assert relative_error(centers, program.usual[name]) > ROUNDING
    for number, found in program.gradients.get(name, {}).items():
        is_smooth = number not in program.cases[name].jumps
        slope = program.slope(name, number) if is_smooth else 0.0
        assert found == pytest.approx(slope, rel=1e-6, abs=1e-6), number


def test_many_values_at_once_are_each_alone():
    both = values("easgd")
    together = jax.tree.map(lambda *x: jnp.stack(x), *map(arrays, both))
    centers = jax.jit(lambda x: centers_of(make("easgd", **x)))
    found = jax.jit(jax.vmap(centers))(together)
    for each, numbers in zip(found, both, strict=True):
        assert relative_error(each, centers(arrays(numbers))) <= ROUNDING


@pytest.mark.parametrize("name", tiers(WITH_NUMBERS, PLAIN))
def test_traced_numbers_promote_nothing_by_themselves(name):
    """jax refuses promotion then, in the user's own program too.

    Strong numbers, of float64 here, would widen bfloat16 and float32.
    """
    sizes = [*zip(sa.WORKERS, (2, 2), strict=True)]

    def steps(numbers, params, step):
        strategy = case(name).make(numbers)
        replica = sa.Replica(params)
        state = strategy.init(params)
        grads, state = strategy.reduce(params, replica, state, step)
        replica, state = strategy.sync(replica, state, step)
        return grads, replica.params, strategy.center(replica.params, state)

    def check(*dtypes):
        numbers = arrays(values(name)[0])
        params = [jnp.zeros((6, 3), dtypes[0]), jnp.zeros(3, dtypes[-1])]
        made: Any = jax.make_jaxpr(steps, axis_env=sizes)(numbers, params, jnp.int32(0))
        assert [x.dtype.name for x in made.out_avals] == 3 * [dtypes[0], dtypes[-1]]

    strict = jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise")
    with jax.enable_x64(False), strict[0], strict[1]:
        check("float32")
    check("bfloat16", "float32")


def structure():
    """Numbers that are no data, each with its value."""
    for name in NAMES:
        for parameter, value in parameters(name).items():
            value = other_value(name, parameter) if value is None else value
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and parameter not in NUMBERS[name]:
                yield name, parameter, value


@pytest.mark.parametrize(("name", "parameter", "value"), list(structure()))
def test_structure_is_not_traced(name, parameter, value):
    def traced(value):
        make(name, **{parameter: value})

    with pytest.raises(ValueError, match=f"{parameter} must be a Python") as error:
        jax.jit(traced)(value)
    assert "\n" not in error.value.args[0]  # jax adds a note


@pytest.mark.parametrize("name", NAMES)
def test_numbers_that_are_not_traced_are_declared_static(name):
    """Else the harness would trace one of them, or compile for each value."""
    factory: Any = sa.ALGORITHMS[name]
    assert {*getattr(factory, "static", ())} == {*rates_of(name)} - {*NUMBERS[name]}


def test_structure_of_combinators_is_not_traced():
    refused = [
        lambda x: sa.every(sa.average(), x),
        lambda x: sa.every(sa.average(), 4, offset=x),
        lambda x: sa.until(sa.average(), x),
        lambda x: sa.delayed(sa.model_averaging(4), x),
        lambda x: sa.paced(sa.average(), [x]),
        lambda x: sa.sampled(0.5, least=x),
        lambda x: reducers.trimmed(x),
    ]
    for of_traced in refused:
        with pytest.raises(ValueError, match="must be a Python number"):
            jax.eval_shape(of_traced, 1)


def test_a_traced_number_is_a_real_scalar():
    for wrong, kind in ((jnp.zeros(3), r"float64\[3\]"), (jnp.bool_(1), r"bool\[\]")):
        with pytest.raises(ValueError, match=f"beta must be a number, got {kind}"):
            jax.eval_shape(lambda x: sa.easgd(beta=x), wrong)


def test_at_end_refuses_a_sync_that_only_the_program_knows():
    with pytest.raises(ValueError, match="cannot sync after step 9"):
        jax.eval_shape(
            lambda x: sa.at_end(sa.scaffnew(4, learning_rate=0.1, seed=x), 9), 0
        )


def test_a_concrete_array_is_checked_as_a_number_is():
    half = jnp.float32(0.5)
    two = jnp.float32(2)

    def traced(x):
        sa.easgd(beta=half)
        with pytest.raises(ValueError, match="beta must be at most 1, got"):
            sa.easgd(beta=two)

    jax.eval_shape(traced, 0)


def test_the_numbers_of_a_factory():
    assert NUMBERS["bmuf"] == ("block_momentum", "block_lr")
    assert NUMBERS["topk_sgd"] == ()  # a density decides shapes
    assert NUMBERS["qsr"] == ("growth", "learning_rate")
    assert "seed" in NUMBERS["fedavg"] and "seed" not in NUMBERS["noloco"]
