"""The registry holds the public functions themselves."""

import ast
import inspect
import pickle
from importlib import import_module
from pathlib import Path

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


@pytest.mark.parametrize("name", sa.ALGORITHMS)
def test_the_source_of_an_algorithm_is_its_own_file(name):
    source_file = inspect.getsourcefile(sa.ALGORITHMS[name])
    assert source_file is not None and source_file.endswith(f"/algorithms/{name}.py")
    assert f"def {name}(" in inspect.getsource(sa.ALGORITHMS[name])


def test_every_file_of_an_algorithm_is_registered_once():
    folder = Path(import_module("syncalgos.algorithms").__file__ or "").parent
    files = {path.stem for path in folder.glob("[!_]*.py")}
    assert files == {*sa.ALGORITHMS}
    tree = ast.parse((folder / "__init__.py").read_text())
    [names] = [node.elts for node in ast.walk(tree) if isinstance(node, ast.List)]
    assert [ast.unparse(name) for name in names] == [*sa.ALGORITHMS]
