"""A strategy's numbers as data: one program for all their values, and its gradients."""

import functools
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from support.chosen_tests import chosen_values, split_around
from support.problems import quadratics, relative_error
from support.requirements import COMPANIONS, PERIOD, make, other_value, parameters
from support.tiers import tiers

import syncalgos as sa
from syncalgos import reducers

pytestmark = pytest.mark.usefixtures("float64")

STEPS = 2 * PERIOD + 2
ROUNDING = 1e-12  # of float64, relative
NAMES = tuple(sa.ALGORITHMS)


def takes_number(name: str, number: str, value: Any) -> bool:
    """Whether an algorithm may be made with a traced number."""
    try:
        jax.eval_shape(lambda x: (make(name, **{number: x}), 0)[1], value)
    except ValueError:
        return False
    return True


def list_rates(name: str) -> tuple[str, ...]:
    """The arguments of an algorithm that are rates, floats or seeds."""
    hints = typing.get_type_hints(sa.ALGORITHMS[name])
    floats = [
        k for k, kind in hints.items() if float in (typing.get_args(kind) or (kind,))
    ]
    return (*floats, "seed") if "seed" in hints else (*floats,)


def list_numbers(name: str) -> tuple[str, ...]:
    """Those of them that may be traced."""
    return tuple(
        argument
        for argument in list_rates(name)
        if takes_number(name, argument, 1 if argument == "seed" else 0.5)
    )


NUMBERS = {name: list_numbers(name) for name in NAMES}
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


def list_settings(name: str) -> dict[str, Any]:
    """Other arguments, with which the numbers matter."""
    sets = [COMPANIONS.get((name, number), {}) for number in NUMBERS[name]]
    merged = functools.reduce(dict.__or__, sets, {})
    return {k: v for k, v in merged.items() if k not in NUMBERS[name]}


def make_values(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two legal values of each number: all of the first, all of the second."""
    first_values = {}
    second_values = {}
    for number in NUMBERS[name]:
        value = other_value(name, number)
        if callable(value):
            value = 0.05  # no schedule
        default = parameters(name)[number]
        first_values[number] = value / 2 if default is None else default
        second_values[number] = value
    return first_values, second_values


def make_arrays(numbers: Any) -> Any:
    """The numbers as a program's own: strongly typed, as no Python number is."""

    def array(x: Any) -> jax.Array:
        return jnp.asarray(x, jnp.int32 if isinstance(x, int) else float)

    return jax.tree.map(array, numbers)


def train_centers(strategy: sa.Strategy) -> jax.Array:
    """All workers' centers after each step, (workers, steps, size)."""
    start, curvature, minimum, noise = quadratics.make_worker_inputs(steps=STEPS)
    # One leaf and some entries of another have no gradient: norms and moments of 0.
    for tree in curvature, noise:
        tree["head"]["scale"] *= 0
        tree["body"]["kernel"] = tree["body"]["kernel"].at[..., 0, :].set(0)
    _, centers = quadratics.program(strategy)([start, curvature, minimum, noise])
    leaves = [x.reshape(4, STEPS, -1) for x in jax.tree.leaves(centers)]
    return jnp.concatenate(leaves, axis=-1)


COMBINATIONS = {
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
            sa.average(),
            lambda replica, *_: jnp.std(replica.params["body"]["bias"]) > x,
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


def make_case(name: str) -> Case:
    if name in COMBINATIONS:
        values = {"x": 0.3}, {"x": 0.8}
        return Case(lambda numbers: COMBINATIONS[name](numbers["x"]), values)
    jumps = {number for number in NUMBERS[name] if (name, number) in JUMPS}
    return Case(
        lambda numbers: make(name, **list_settings(name), **numbers),
        make_values(name),
        frozenset({*jumps, "seed"}),
    )


# {a case's name: {an argument: its value}}.
Numbers = dict[str, dict[str, Any]]


class Program:
    """The training of several cases, compiled once for all values of their numbers.

    Attributes:
        cases: by name.
        second: the second values of all numbers.
        compiled: numbers -> the workers' centers, by name.
        centers: those of the second values.
        usual: those of the first values.
        python: those of the second values as Python's numbers.
        gradients: of the sum of all squared last centers, by the second values.
    """

    def __init__(self, names: Sequence[str]):
        self.cases = {name: make_case(name) for name in names}
        self.compiled = jax.jit(self._train)
        first_numbers = {name: case.values[0] for name, case in self.cases.items()}
        self.second = {name: case.values[1] for name, case in self.cases.items()}
        self.centers = self.compiled(make_arrays(self.second))
        self.usual = self.compiled(make_arrays(first_numbers))
        self.python = jax.jit(lambda: self._train(self.second))()
        smooth_numbers = make_arrays(self._list_smooth_numbers())
        self.gradients = jax.jit(jax.grad(self._measure_ends))(smooth_numbers)

    def _train(self, numbers: Numbers) -> dict[str, jax.Array]:
        return {
            name: train_centers(case.make(numbers[name]))
            for name, case in self.cases.items()
        }

    def _list_smooth_numbers(self) -> dict[str, dict[str, float]]:
        """The numbers that have a gradient, of the second values."""
        smooth_numbers = {}
        for name in self.second:
            if name in NUMBERS:
                numbers = self.second[name]
                smooth_numbers[name] = {
                    argument: float(value)
                    for argument, value in numbers.items()
                    if argument != "seed"
                }
        return smooth_numbers

    def _measure_ends(self, smooth_numbers: Numbers) -> Any:
        all_numbers = {
            name: numbers | smooth_numbers.get(name, {})
            for name, numbers in make_arrays(self.second).items()
        }
        centers = self._train(all_numbers)
        return sum(jnp.sum(x[:, -1] ** 2) for x in centers.values())

    def compute_slope(self, name: str, number: str) -> float:
        """The difference quotient of a case's end."""
        value = self.second[name][number]
        difference = 1e-6 * value

        def measure_end(value: float) -> float:
            numbers = self.second | {name: self.second[name] | {number: value}}
            centers = self.compiled(make_arrays(numbers))[name]
            return float(jnp.sum(centers[:, -1] ** 2))

        higher = measure_end(value + difference)
        lower = measure_end(value - difference)
        return (higher - lower) / (2 * difference)


# Rates of means and momenta, a seed, medians of norms, a table, data-dependent steps.
SLOW_CASES = ("bmuf", "quantized_sgd", "edit")
# Shares of workers, schedules, factors.
SLOW_CASES += ("fedavg", "qsr", "powersgd", *COMBINATIONS)
# A mean, a block momentum, weights, servers, bits: each takes its numbers another way.
DEFAULT_NAMES = ("sync_sgd", "bmuf", "fedavg", "decoupled_diloco", "quantized_sgd")
TOGETHER = 6
CASES = [*WITH_NUMBERS, *COMBINATIONS]


@pytest.fixture(scope="module")
def programs_by_name(request: pytest.FixtureRequest) -> Callable[[str], Program]:
    """name -> the program that its case shares with others of the session's tests."""
    names = chosen_values(request, "name")
    programs = {}

    def get_program(name: str) -> Program:
        if name not in programs:
            together = split_around(name, names, TOGETHER)
            programs.update(dict.fromkeys(together, Program(together)))
        return programs[name]

    return get_program


@pytest.mark.parametrize("name", tiers(CASES, slow=SLOW_CASES))
def test_one_program_serves_all_values_and_has_their_gradients(name, programs_by_name):
    program = programs_by_name(name)
    centers = program.centers[name]
    assert relative_error(centers, program.python[name]) <= ROUNDING
    assert relative_error(centers, program.usual[name]) > ROUNDING
    for number, gradient in program.gradients.get(name, {}).items():
        is_smooth = number not in program.cases[name].jumps
        slope = program.compute_slope(name, number) if is_smooth else 0.0
        assert gradient == pytest.approx(slope, rel=1e-6, abs=1e-6), number


def test_many_values_at_once_are_each_alone():
    settings = [make_arrays(numbers) for numbers in make_values("easgd")]
    stacked_settings = jax.tree.map(lambda *x: jnp.stack(x), *settings)
    train = jax.jit(lambda numbers: train_centers(make("easgd", **numbers)))
    batched_centers = jax.jit(jax.vmap(train))(stacked_settings)
    for centers, numbers in zip(batched_centers, settings, strict=True):
        assert relative_error(centers, train(numbers)) <= ROUNDING


@pytest.mark.parametrize("name", tiers(WITH_NUMBERS, DEFAULT_NAMES))
def test_traced_numbers_promote_nothing_by_themselves(name):
    """jax refuses promotion then, in the user's own program too.

    Strong numbers, of float64 here, would widen bfloat16 and float32.
    """
    sizes = [*zip(sa.WORKERS, (2, 2), strict=True)]

    def steps(numbers: Any, params: Any, step: jax.Array) -> tuple[Any, Any, Any]:
        strategy = make_case(name).make(numbers)
        replica = sa.Replica(params)
        state = strategy.init(params)
        grads, state = strategy.reduce(params, replica, state, step)
        replica, state = strategy.sync(replica, state, step)
        return grads, replica.params, strategy.center(replica.params, state)

    def check(*dtypes: str) -> None:
        numbers = make_arrays(make_values(name)[0])
        params = [jnp.zeros((6, 3), dtypes[0]), jnp.zeros(3, dtypes[-1])]
        jaxpr: Any = jax.make_jaxpr(steps, axis_env=sizes)(
            numbers, params, jnp.int32(0)
        )
        assert [x.dtype.name for x in jaxpr.out_avals] == 3 * [dtypes[0], dtypes[-1]]

    with (
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
    ):
        check("float32")
    check("bfloat16", "float32")


def list_structure() -> Iterator[tuple[str, str, Any]]:
    """Numbers that are no data, each with its value."""
    for name in NAMES:
        for parameter, value in parameters(name).items():
            value = other_value(name, parameter) if value is None else value
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and parameter not in NUMBERS[name]:
                yield name, parameter, value


@pytest.mark.parametrize(("name", "parameter", "value"), list(list_structure()))
def test_structure_is_not_traced(name, parameter, value):
    def make_traced(value: Any) -> None:
        make(name, **{parameter: value})

    with pytest.raises(ValueError, match=f"{parameter} must be a Python") as error:
        jax.jit(make_traced)(value)
    assert "\n" not in error.value.args[0]  # jax adds a note


@pytest.mark.parametrize("name", NAMES)
def test_numbers_that_are_not_traced_are_declared_static(name):
    """Else the harness would trace one of them, or compile for each value."""
    factory: Any = sa.ALGORITHMS[name]
    assert {*getattr(factory, "static", ())} == {*list_rates(name)} - {*NUMBERS[name]}


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

    def make_traced(x: jax.Array) -> None:
        sa.easgd(beta=half)
        with pytest.raises(ValueError, match="beta must be at most 1, got"):
            sa.easgd(beta=two)

    jax.eval_shape(make_traced, 0)


def test_the_numbers_of_a_factory_are_those_that_decide_no_shape():
    assert NUMBERS["bmuf"] == ("block_momentum", "block_lr")
    assert NUMBERS["topk_sgd"] == ()  # a density decides shapes
    assert NUMBERS["qsr"] == ("growth", "learning_rate")
    assert "seed" in NUMBERS["fedavg"] and "seed" not in NUMBERS["noloco"]
