"""A strategy's numbers as data: one program for all their values, and its gradients."""

import functools
import typing

import jax
import jax.numpy as jnp
import optax
import pytest
from owed import PERIOD, WITH, make, other_value, parameters
from problems import quadratics, relative_error

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


def numbers_of(name):
    """The arguments of an algorithm that may be traced: rates, floats and seeds."""
    asked = {k: p for k, p in typing.get_type_hints(sa.ALGORITHMS[name]).items()}
    floats = [k for k, p in asked.items() if float in (typing.get_args(p) or (p,))]
    seed = ["seed"] if "seed" in asked else []
    found = [x for x in floats if is_taken(name, x, 0.5)]
    return (*found, *[x for x in seed if is_taken(name, x, 1)])


NUMBERS = {name: numbers_of(name) for name in NAMES}
WITH_NUMBERS = [name for name in NAMES if NUMBERS[name]]
TRACED: list[str] = []  # a name for each compilation

# Numbers that move results by jumps, between which they change nothing.
JUMPS = {
    ("fedavg", "fraction"): "how many workers take part",
    ("qsr", "growth"): "which steps sync",
    ("qsr", "learning_rate"): "which steps sync",
    ("dynamic_averaging", "bound"): "which steps sync",
    ("edit", "threshold"): "which norms are usual",
    ("edit", "rate"): "which norms are usual",
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
    first, second = {}, {}
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


def centers_of(strategy, dtype=float):
    """All workers' centers after each step, (workers, steps, size)."""
    start, curvature, minimum, noise = quadratics.of_workers(steps=STEPS, dtype=dtype)
    # One leaf and some entries of another have no gradient: norms and moments of 0.
    for tree in curvature, noise:
        tree["head"]["scale"] *= 0
        tree["body"]["kernel"] = tree["body"]["kernel"].at[..., 0, :].set(0)
    _, centers = quadratics.program(strategy, steps=STEPS)(
        [start, curvature, minimum, noise]
    )
    leaves = [x.reshape(4, STEPS, -1) for x in jax.tree.leaves(centers)]
    return jnp.concatenate(leaves, axis=-1)


def making(name):
    """The algorithm's strategy, of its numbers by name."""
    return lambda numbers: make(name, **settings(name), **numbers)


@functools.cache
def program_of(name):
    """The program of all values: numbers by name -> centers."""

    def centers(numbers):
        TRACED.append(name)
        return centers_of(making(name)(numbers))

    return jax.jit(centers)


def check_one_program(name, of_any, make, *values):
    """One compilation serves all values, with the results of Python numbers."""
    for numbers in values:
        of_one = jax.jit(lambda x=numbers: centers_of(make(x)))
        assert relative_error(of_any(arrays(numbers)), of_one()) <= ROUNDING
    assert TRACED.count(name) == 1


@pytest.mark.sample(4, slow=6)
@pytest.mark.parametrize("name", WITH_NUMBERS)
def test_one_program_serves_all_values(name):
    check_one_program(name, program_of(name), making(name), *values(name))


@pytest.mark.sample(4, slow=6)
@pytest.mark.parametrize("name", WITH_NUMBERS)
def test_many_values_at_once_are_each_alone(name):
    both = values(name)
    together = jax.tree.map(lambda *x: jnp.stack(x), *map(arrays, both))
    found = jax.jit(jax.vmap(lambda x: centers_of(making(name)(x))))(together)
    for centers, numbers in zip(found, both, strict=True):
        assert relative_error(centers, program_of(name)(arrays(numbers))) <= ROUNDING


@pytest.mark.sample(20, slow=20)
@pytest.mark.parametrize(("dtype", "wide"), [("bfloat16", False), ("float32", True)])
@pytest.mark.parametrize("name", WITH_NUMBERS)
def test_traced_numbers_widen_nothing(name, dtype, wide):
    """As strong float32 they would bfloat16, as strong float64 float32."""
    with jax.enable_x64(wide):
        numbers = arrays(values(name)[0])
        centers = jax.eval_shape(lambda x: centers_of(making(name)(x), dtype), numbers)
    assert centers.dtype == dtype


@pytest.mark.parametrize("name", WITH_NUMBERS)
def test_traced_numbers_promote_nothing_by_themselves(name):
    """jax refuses promotion then, in the user's own program too."""
    sizes = [*zip(sa.WORKERS, (2, 2), strict=True)]

    def steps(numbers, params, grads, step):
        strategy = making(name)(numbers)
        replica, state = sa.Replica(params), strategy.init(params)
        grads, state = strategy.reduce(grads, replica, state, step)
        replica, state = strategy.sync(replica, state, step)
        return grads, strategy.center(replica.params, state)

    strict = jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise")
    with jax.enable_x64(False), strict[0], strict[1]:
        params = {"w": jnp.zeros((6, 3)), "b": jnp.zeros(3)}
        numbers = arrays(values(name)[0])
        jax.make_jaxpr(steps, axis_env=sizes)(numbers, params, params, jnp.int32(0))


@pytest.mark.sample(4, slow=6)
@pytest.mark.parametrize("name", [n for n in WITH_NUMBERS if {*NUMBERS[n]} - {"seed"}])
def test_gradients_are_those_of_differences(name):
    numbers = values(name)[1]
    seeds = {"seed": numbers.pop("seed")} if "seed" in numbers else {}

    def end(numbers):
        return jnp.sum(program_of(name)(arrays({**numbers, **seeds}))[:, -1] ** 2)

    def at(number, value):
        return float(end({**numbers, number: value}))

    gradient = jax.jit(jax.grad(end))({k: float(x) for k, x in numbers.items()})
    for number, value in numbers.items():
        apart, slope = 1e-6 * value, 0.0
        if (name, number) not in JUMPS:
            ends = at(number, value + apart), at(number, value - apart)
            slope = (ends[0] - ends[1]) / (2 * apart)
        found = float(gradient[number])
        assert found == pytest.approx(slope, rel=1e-6, abs=1e-6), number


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
    "paced": lambda x: sa.paced(sa.bmuf(4, block_momentum=x), [4, 3, 2, 1]),
    "after": (
        lambda x: sa.chain(
            sa.until(sa.sync_sgd(), 3), sa.after(sa.bmuf(4, block_momentum=x), 3)
        )
    ),
    "at_syncs": (
        lambda x: sa.at_syncs(sa.easgd(4, beta=x), sa.reset(optax.sgd(quadratics.LR)))
    ),
    "at_end": lambda x: sa.at_end(sa.qsr(2, growth=x, learning_rate=0.1), STEPS),
    "schedule": lambda x: sa.every(sa.average(), lambda step: 1 + x * step),
    "decided": (
        lambda x: sa.decided(
            sa.average(), lambda own, *_: own.params["head"]["scale"] > x
        )
    ),
    "masked": (
        lambda x: sa.masked(sa.fedprox(4, proximal=x), {"body": True, "head": False})
    ),
    "clipped": lambda x: sa.reduce_with(reducers.clipped(x)),
    "error_feedback": (
        lambda x: sa.reduce_with(reducers.error_feedback(reducers.top_k(0.3), x))
    ),
}


@pytest.mark.sample(3, slow=8)
@pytest.mark.parametrize("name", COMBINED)
def test_one_program_serves_all_values_of_a_combinator(name):
    @jax.jit
    def of_any(number):
        TRACED.append(name)
        return centers_of(COMBINED[name](number))

    check_one_program(name, of_any, COMBINED[name], 0.3, 0.8)


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
    half, two = jnp.float32(0.5), jnp.float32(2)

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
