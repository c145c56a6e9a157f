"""A wrong name is answered in one line: with the nearest one, or with all."""

import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import optax
import pytest

import syncalgos as sa
from syncalgos import reducers
from syncalgos.writing import factory


def answer(call: Callable[[], Any], kind: type[Exception]) -> str:
    """The one line of the error that a call ends in."""
    with pytest.raises(kind) as raised:
        call()
    [line] = str(raised.value.args[0]).splitlines()
    return line


def make_trainer(**arguments: Any) -> sa.DataParallel:
    def loss(params, batch):
        return (params - batch).mean() ** 2

    return sa.DataParallel(loss, optax.sgd(0.1), sa.bmuf(), workers=2, **arguments)


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("bmuff", "did you mean 'bmuf'?"),
        ("dilco", "did you mean 'diloco'?"),
        ("DataParalel", "did you mean 'DataParallel'?"),
        ("local_sgd", "use 'model_averaging'"),
        ("ddp", "use 'sync_sgd'"),
        ("allreduce", "use 'sync_sgd'"),
    ],
)
def test_a_wrong_name_of_the_package_is_answered_with_the_nearest(wrong, nearest):
    line = answer(lambda: getattr(sa, wrong), AttributeError)
    assert line.startswith(f"module 'syncalgos' has no attribute {wrong!r}")
    assert line.endswith(nearest)


def test_a_name_that_is_near_to_none_is_answered_with_where_all_are():
    line = answer(lambda: getattr(sa, "zzz"), AttributeError)  # noqa: B009
    assert line == (
        "module 'syncalgos' has no attribute 'zzz': dir(syncalgos) lists its names"
    )


def test_an_import_of_a_wrong_name_is_answered_with_the_nearest():
    program = "from syncalgos import bmuff"
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert ended.stderr.splitlines()[-1] == (
        "ImportError: cannot import name 'bmuff' from 'syncalgos'; did you mean 'bmuf'?"
    )


@pytest.mark.slow
def test_other_names_are_refused_without_jax():
    program = """
import sys, syncalgos
names = "a.b", "nothing", "__wrapped__", "numpy", "", "bmuff", "local_sgd"
assert not any(hasattr(syncalgos, name) for name in names)
try:
    from syncalgos import bmuff
except ImportError:
    pass
assert "jax" not in sys.modules and syncalgos.bmuf"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("bmfu", "unknown algorithm 'bmfu'; did you mean 'bmuf'?"),
        ("local_sgd", "unknown algorithm 'local_sgd': use 'model_averaging'"),
        ("zzz", f"unknown algorithm 'zzz' (one of: {', '.join(sa.ALGORITHMS)})"),
    ],
)
def test_the_registry_answers_a_wrong_name_with_the_nearest(wrong, nearest):
    assert answer(lambda: sa.ALGORITHMS[wrong], KeyError) == nearest


def test_the_registry_is_a_dict_in_all_other_ways():
    assert isinstance(sa.ALGORITHMS, dict)
    assert "bmfu" not in sa.ALGORITHMS and sa.ALGORITHMS.get("bmfu") is None
    with pytest.raises(KeyError):
        sa.ALGORITHMS[3]  # type: ignore[index]


WRONG_ARGUMENTS: dict[str, tuple[Callable[[], Any], str]] = {
    "an algorithm's": (
        lambda: sa.bmuf(4, momentum=0.9),
        "bmuf has no argument 'momentum'; did you mean 'block_momentum'? "
        "(one of: period, block_momentum, block_lr, nesterov, axis)",
    ),
    "a part of a name": (
        lambda: sa.diloco(4, lr=0.7),
        "diloco has no argument 'lr'; did you mean 'outer_lr'? (one of: period, ",
    ),
    "near to none": (
        lambda: sa.easgd(zzz=1),
        "easgd has no argument 'zzz' (one of: period, beta, axis)",
    ),
    "a combinator's": (
        lambda: sa.every(sa.bmuf(), perod=4),
        "every has no argument 'perod'; did you mean 'period'? "
        "(one of: strategy, period, offset)",
    ),
    "a reducer's": (
        lambda: reducers.top_k(0.1, bit=4),
        "top_k has no argument 'bit'; did you mean 'bits'? (one of: density, ",
    ),
    "an argument by position alone": (
        lambda: sa.chain(strategies=sa.bmuf()),
        "chain has no argument 'strategies' (it takes none by name)",
    ),
    "the trainer's": (
        lambda: make_trainer(acumulate=2),
        "DataParallel has no argument 'acumulate'; did you mean 'accumulate'? "
        "(one of: loss, optimizer, ",
    ),
    "a placement's": (
        lambda: sa.Placement(device=[0]),
        "Placement has no argument 'device'; did you mean 'devices'? "
        "(one of: devices, lanes, ",
    ),
    "the ledger's": (
        lambda: sa.communication(sa.bmuf(), np.ones(2), worker=2, steps=3),
        "communication has no argument 'worker'; did you mean 'workers'? "
        "(one of: strategy, replica, workers, steps, taken)",
    ),
}


@pytest.mark.parametrize("kind", WRONG_ARGUMENTS)
def test_a_wrong_argument_is_answered_with_the_nearest(kind):
    call, message = WRONG_ARGUMENTS[kind]
    assert answer(call, TypeError).startswith(message)


WRONG_NUMBERS: dict[str, tuple[Callable[[], Any], str]] = {
    "an algorithm's": (
        lambda: sa.powersgd(2, 3),
        "powersgd takes rank by position, but the call has 2 by position: give the "
        "others by name (seed, min_rate, dense_steps, layered, axis)",
    ),
    "none by position": (
        lambda: sa.sync_sgd("mean"),
        "sync_sgd takes nothing by position, but the call has 1 by position: give the "
        "others by name (reduce, seed, axis)",
    ),
    "the axis by position": (
        lambda: sa.scaffold(4, 0.1, "w"),
        "scaffold takes period, learning_rate by position, but the call has 3",
    ),
    "a required one behind defaults": (
        lambda: sa.slowmo(4),
        "slowmo needs an argument 'learning_rate', which has no default (its "
        "arguments: period, slow_momentum, slow_lr, learning_rate, axis)",
    ),
    "the second": (
        lambda: sa.scaffold(4),
        "scaffold needs an argument 'learning_rate'",
    ),
    "a required one by name": (
        lambda: sa.scaffnew(4),
        "scaffnew needs an argument 'learning_rate'",
    ),
    "the only required one": (
        lambda: sa.qsr(),
        "qsr needs an argument 'learning_rate'",
    ),
    "a combinator's": (
        lambda: sa.every(sa.average()),
        "every needs an argument 'period', which has no default (its arguments: "
        "strategy, period, offset)",
    ),
    "the trainer's": (
        lambda: sa.DataParallel(1, 2, 3, 4),
        "DataParallel takes loss, optimizer, strategy by position, but the call has 4",
    ),
    "the trainer's without a strategy": (
        lambda: sa.DataParallel(1, 2, workers=2),
        "DataParallel needs an argument 'strategy'",
    ),
    "a placement's": (
        lambda: sa.Placement([0], 2),
        "Placement takes devices by position, but the call has 2",
    ),
    "a reducer's": (
        lambda: reducers.top_k(0.5, 4, bits=4),
        "top_k takes density by position, but the call has 2",
    ),
    "a reducer's required one": (
        lambda: reducers.error_feedback(),
        "error_feedback needs an argument 'reducer'",
    ),
}


@pytest.mark.parametrize("kind", WRONG_NUMBERS)
def test_too_many_arguments_by_position_and_missing_ones_are_named(kind):
    call, message = WRONG_NUMBERS[kind]
    assert answer(call, TypeError).startswith(message)


@pytest.mark.parametrize(
    "name",
    [
        "center_of",
        "graph",
        "lookup",
        "parts_of",
        "per_example",
        "sampled",
        "stacked",
        "stateless",
        "sync_metrics",
    ],
)
def test_a_function_that_makes_no_strategy_answers_wrong_calls_as_well(name):
    function = getattr(sa, name)
    names = [*inspect.signature(function).parameters]
    line = answer(lambda: function(**{f"{names[0]}s": 1}), TypeError)
    assert line.startswith(
        f"{name} has no argument '{names[0]}s'; did you mean {names[0]!r}? (one of: "
    )
    line = answer(function, TypeError)
    assert line.startswith(f"{name} needs an argument {names[0]!r}")
    line = answer(lambda: function(*range(9)), TypeError)
    assert line.startswith(f"{name} takes {names[0]}") and "has 9 by position" in line


def test_a_factory_of_a_users_own_may_take_any_argument():
    @factory
    def bmuf_of_mine(**arguments: Any) -> sa.Strategy:
        return sa.bmuf(**arguments)

    assert repr(bmuf_of_mine(period=4)) == "bmuf_of_mine(period=4)"
    line = answer(lambda: bmuf_of_mine(perod=4), TypeError)
    assert line.startswith("bmuf has no argument 'perod'; did you mean 'period'?")


def test_arguments_of_reducers_behind_the_first_are_keyword_only():
    functions = [x for x in vars(reducers).values() if inspect.isfunction(x)]
    for function in functions:
        if function is not reducers.resolve:
            _, *other_parameters = inspect.signature(function).parameters.values()
            assert all(p.kind is p.KEYWORD_ONLY for p in other_parameters)
    assert len(functions) == 20


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [("lane_from", "; did you mean 'lane_form'?"), ("stack", "")],
)
def test_a_wrong_attribute_of_a_trainer_is_answered_with_the_nearest(wrong, hint):
    trainer = make_trainer()
    line = answer(lambda: getattr(trainer, wrong), AttributeError)
    assert line == f"DataParallel has no attribute {wrong!r}{hint}"


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("replicas", "; did you mean 'replica'?"),
        (
            "params",
            ": use trainer.center(state).params for one plain model, or "
            "state.replica.params for all workers",
        ),
    ],
)
def test_a_wrong_attribute_of_a_state_is_answered_with_the_nearest(wrong, hint):
    trainer = make_trainer()
    state = trainer.init(np.zeros(()))
    line = answer(lambda: getattr(state, wrong), AttributeError)
    assert line == f"TrainState has no attribute {wrong!r}{hint}"


def test_a_wrong_form_of_lanes_is_answered_with_the_nearest():
    placement = sa.Placement(lane_form="vectorised")
    line = answer(lambda: make_trainer(placement=placement), ValueError)
    assert "did you mean 'vectorized'?" in line
