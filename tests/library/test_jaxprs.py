"""The walk over jaxprs: each primitive that runs one, once."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_batching import custom_vmap
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec as P

import syncalgos as sa
from syncalgos import Strategy, _jaxprs, collectives, communication
from syncalgos._engine import lone_branches

FIRST_NUMBERS = np.float32([1, 2])
SECOND_NUMBERS = np.float32([3, 5])
WORKERS = {"axis_env": [("devices", 2), ("lanes", 1)]}


def with_jvp(run: Callable) -> Callable:
    decorated = jax.custom_jvp(run)
    decorated.defjvp(lambda x, t: (run(*x), run(*t)))
    return decorated


def with_vjp(run: Callable) -> Callable:
    decorated = jax.custom_vjp(run)
    decorated.defvjp(lambda *x: (run(*x), None), lambda _, g: (g,))
    return decorated


def with_rule(run: Callable) -> Callable:
    decorated = custom_vmap(run)
    decorated.def_vmap(lambda lanes, mapped, *x: (run(*x), True))
    return decorated


def on_devices(run: Callable) -> Callable:
    mesh = jax.make_mesh((1,), ("d",))
    return jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)


def make_solver(run: Callable) -> Callable:
    """Makes a solver of equations, which runs the function with operands of its own."""
    return lambda x, *operands: lax.custom_linear_solve(
        lambda z: z * SECOND_NUMBERS, x, lambda _, x: run(x, *operands), symmetric=True
    )


# Functions that run a given one on their arguments, in the primitive of this name.
ONCE = {
    "jit": jax.jit,
    "remat2": jax.checkpoint,
    "composite": lambda run: lax.composite(run, "own.composite"),
    "custom_jvp_call": with_jvp,
    "custom_vjp_call": with_vjp,
    "custom_vmap_call": with_rule,
    "shard_map": on_devices,
    "custom_linear_solve": make_solver,
    "cond": lambda run: lambda x, *operands: lax.cond(x[0] > 0, run, run, x, *operands),
}
LOOPS = {
    "scan": lambda run: lambda x: lax.scan(lambda c, _: (run(c), None), x, None, 3)[0],
    "while": lambda run: (
        lambda x: lax.while_loop(
            lambda c: c[1] < 3, lambda c: (run(c[0]), c[1] + 1), (x, 0)
        )[0]
    ),
}


@pytest.mark.parametrize("name", ONCE)
def test_operands_reach_the_inputs_of_what_runs_once(name):
    def visit(equation, values):
        arms, carry, passes = _jaxprs.runs(equation, values)
        met.append(equation.primitive.name)
        if arms:
            assert (carry, passes) == (slice(0), 1)
            return _jaxprs.follow(*arms[-1], visit)
        return [equation.primitive.bind(*values, **equation.params)]

    met = []
    called = ONCE[name](lambda x, y: 2 * x - y)
    jaxpr = jax.make_jaxpr(called)(FIRST_NUMBERS, SECOND_NUMBERS)
    np.testing.assert_array_equal(
        _jaxprs.follow(jaxpr, [FIRST_NUMBERS, SECOND_NUMBERS], visit)[0], [-1, -1]
    )
    assert name in met


def test_every_primitive_of_the_table_is_met():
    """No function binds two of them; bytes of row_sparse meet that of jax 0.12."""
    assert {*_jaxprs.RUNS} == {
        *ONCE,
        *LOOPS,
        "call",
        "closed_call",
        "call_hi_primitive",
    }


def test_a_loop_counts_its_equations_once_a_pass():
    def program(x: jax.Array) -> Any:
        once = LOOPS["scan"](jax.jit(LOOPS["scan"](jnp.sin)))(x)
        return LOOPS["while"](jnp.sin)(once)

    equations = _jaxprs.equations(jax.make_jaxpr(program)(FIRST_NUMBERS).jaxpr)
    assert [n for e, n in equations if e.primitive.name == "sin"] == [9, 1]


def refuse(program: Callable, differs: Sequence[bool] = (True,)) -> None:
    """Refuses a program by these inputs that differ between workers."""
    jaxpr = jax.make_jaxpr(program, **WORKERS)(*[FIRST_NUMBERS] * len(differs)).jaxpr
    lone_branches.follow_differing(jaxpr, differs)


def mean(x: jax.Array) -> Any:
    return collectives.mean(x)


def meeting_if(value: jax.Array) -> Any:
    """Meets the other workers if a value says so."""
    return lax.cond(value.sum() > 1, mean, jnp.zeros_like, value)


ALL = {**ONCE, **LOOPS}
LONE = "worker's data contains a collective .psum"


@pytest.mark.parametrize("name", ALL)
def test_a_difference_of_workers_is_followed_through_each_primitive(name):
    with pytest.raises(ValueError, match=LONE):
        refuse(lambda x: meeting_if(ALL[name](jnp.sin)(x)))
    refuse(lambda x: meeting_if(ALL[name](jnp.sin)(x)), [False])


@pytest.mark.parametrize("name", [name for name in ALL if name != "cond"])
def test_a_result_that_a_primitive_makes_common_is_so_behind_it(name):
    refuse(lambda x: meeting_if(ALL[name](mean)(x)))


def by_passes(turns):
    """Meets by two values of a loop that hands the second on to the first."""
    return lambda x, y: meeting_if(turns(lambda c: (c[1], x), (y, y))[0])


TURNS = {
    "scan": lambda run, c: lax.scan(lambda c, _: (run(c), None), c, None, 3)[0],
    "while": lambda run, c: lax.while_loop(lambda c: c[0][0] < 9, run, c),
}


@pytest.mark.parametrize("name", TURNS)
def test_a_difference_that_a_later_pass_brings_is_followed(name):
    with pytest.raises(ValueError, match=LONE):
        refuse(by_passes(TURNS[name]), [True, False])
    refuse(by_passes(TURNS[name]), [False, False])


def test_a_loop_that_workers_leave_at_different_passes_must_not_send():
    """The first pass is common to all; its result is not."""

    def until_small(x, size):
        def shrink(carry):
            return carry[0] - collectives.mean(x) * 0, jnp.abs(carry[0]).sum()

        return lax.while_loop(lambda carry: carry[1] > 1, shrink, (x, size[0]))

    with pytest.raises(ValueError, match=r"a loop that .* contains a collective"):
        refuse(until_small, [True, False])
    refuse(until_small, [False, False])


foreign = Primitive("foreign")
foreign.def_abstract_eval(lambda x, **params: x)


def running(run: Callable) -> Callable:
    """Binds a primitive that nobody knows, with a jaxpr."""
    return lambda x: foreign.bind(x, jaxpr=jax.make_jaxpr(run, **WORKERS)(x))


UNKNOWN = {
    "a jaxpr that sends": running(mean),
    "one inside that sends": jax.jit(running(jax.jit(mean))),
    "a collective": lambda x: foreign.bind(x, axes=("devices",)),
    "a collective by another word": lambda x: foreign.bind(x, over=("devices",)),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_primitive_is_never_taken_for_arithmetic(name):
    with pytest.raises(
        ValueError, match=r"how foreign sends is not known.*collectives"
    ):
        refuse(UNKNOWN[name], [False])
    with pytest.raises(ValueError, match="the traffic of foreign cannot be counted"):
        count_bytes(UNKNOWN[name])


def count_bytes(run: Callable) -> Any:
    def sync(
        replica: sa.Replica, state: Any, step: jax.Array
    ) -> tuple[sa.Replica, Any]:
        return replica._replace(params=run(replica.params)), state

    return communication(Strategy(sync=sync), FIRST_NUMBERS, workers=2, steps=1)


def test_the_ledger_alone_refuses_what_it_cannot_see_into():
    """A loss may run a kernel: it meets nobody there."""
    refuse(running(jnp.sin))
    with pytest.raises(ValueError, match="the traffic of foreign cannot be counted"):
        count_bytes(running(jnp.sin))
