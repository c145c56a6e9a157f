"""The registry holds the public functions themselves."""

import inspect
import pickle
from importlib import import_module

import pytest

import syncalgos as sa


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
