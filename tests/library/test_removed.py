"""Calls of 0.2 end in one line that says what to use now; the registry is plain."""

import inspect
import pickle
import subprocess
import sys
from importlib import import_module

import jax
import numpy as np
import optax
import pytest

import syncalgos as sa
from syncalgos import reducers, removed


def answer(call):
    """The one line of the error that a call ends in."""
    with pytest.raises((AttributeError, TypeError, ValueError)) as found:
        call()
    [line] = str(found.value).splitlines()
    return line


@pytest.mark.parametrize("row", removed.INSTEAD)
def test_what_is_gone_is_answered_with_what_to_use_now(row):
    name, _, argument = row.partition(".")
    if row.endswith("(strategy)"):
        function = getattr(sa, row.removesuffix("(strategy)"))
        line = answer(lambda: function(4, sa.average()))
    elif argument:
        function = getattr(reducers if name not in dir(sa) else sa, name)
        line = answer(lambda: function(**{argument: 0.5}))
        assert argument not in inspect.signature(function).parameters
    else:
        line = answer(lambda: getattr(sa, name))
    assert line.endswith(f": {removed.INSTEAD[row]}")


def test_other_names_are_refused_without_jax():
    program = """
import sys, syncalgos
names = "a.b", "nothing", "__wrapped__", "numpy", ""
assert not any(hasattr(syncalgos, name) for name in names)
assert "jax" not in sys.modules and syncalgos.bmuf"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_attributes_that_are_gone_are_answered():
    loss, sgd = lambda params, batch: (params - batch).mean() ** 2, optax.sgd(0.1)
    trainer = sa.DataParallel(loss, sgd, sa.bmuf(), workers=2)
    owners = {"DataParallel": trainer, "TrainState": trainer.init(np.zeros(()))}
    for row, now in removed.ATTRIBUTES.items():
        owner, _, name = row.partition(".")
        line = answer(lambda owner=owner, name=name: getattr(owners[owner], name))
        assert line == f"{owner} has no attribute {name!r}: {now}"


@pytest.mark.parametrize("before", removed.LANE_FORMS)
def test_former_names_of_lane_forms_are_answered(before):
    placement = sa.Placement(lane_form=before)
    line = answer(
        lambda: sa.DataParallel(
            lambda p, batch: 0.0, optax.sgd(0.1), sa.bmuf(), placement=placement
        )
    )
    assert f"unknown lane_form '{before}': {removed.LANE_FORMS[before]} (" in line


def test_a_call_by_position_is_the_call_that_its_warning_shows():
    with pytest.warns(DeprecationWarning, match=r"write Placement\(\[0\], lanes=2\): "):
        assert sa.Placement([0], 2) == sa.Placement([0], lanes=2)
    with pytest.warns(
        DeprecationWarning, match=r"write mean\(None, axis='w'\): 0.5 refuses"
    ):
        assert reducers.mean(None, "w").mean_over == "w"
    with pytest.warns(DeprecationWarning, match=r"write top_k\(0.5, bits=4, seed=1\)"):
        former = reducers.top_k(0.5, 4, 1)
    sent = [
        jax.vmap(lambda x, made=made: made.over("w").combine(x, (), 3), axis_name="w")
        for made in (former, reducers.top_k(0.5, bits=4, seed=1))
    ]
    x = np.random.default_rng(0).normal(size=(2, 9))
    np.testing.assert_array_equal(*(each(x)[0] for each in sent))


def test_arguments_of_reducers_behind_the_first_are_keyword_only():
    factories = [x for x in vars(reducers).values() if inspect.isfunction(x)]
    for factory in factories:
        if factory is not reducers.resolve:
            _, *rest = inspect.signature(factory).parameters.values()
            assert all(p.kind is p.KEYWORD_ONLY for p in rest)
    assert len(factories) == 20


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sa.bmuf(4, block=3), "block"),
        (lambda: sa.bmuf(4, 0.5), "positional"),
        (lambda: sa.dgc(warm=3), "warm"),
        (lambda: sa.slowmo(4), "learning_rate"),
        (lambda: sa.scaffold(4), "learning_rate"),
        (lambda: sa.scaffnew(4), "learning_rate"),
        (lambda: sa.qsr(), "learning_rate"),
        (lambda: sa.DataParallel(1, 2, 3, 4), "positional"),
        (lambda: reducers.top_k(*range(9)), "from 0 to 1 positional"),
        (lambda: reducers.top_k(0.5, 4, bits=4), "0 to 1 positional"),
    ],
)
def test_wrong_arguments_are_pythons_own_errors(call, message):
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.parametrize("name", sa.ALGORITHMS)
def test_the_registry_has_the_functions_themselves(name):
    factory = sa.ALGORITHMS[name]
    assert factory is getattr(sa, name)
    assert factory is getattr(import_module(f"syncalgos.algorithms.{name}"), name)
    assert pickle.loads(pickle.dumps(factory)) is factory
    *parameters, axis = inspect.signature(factory).parameters.values()
    assert (axis.name, axis.default) == ("axis", sa.WORKERS)
    for p in (*parameters, axis):
        assert p.kind is p.KEYWORD_ONLY or p.name == "period"
