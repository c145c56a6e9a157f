"""The registry holds the public functions themselves."""

import ast
import inspect
import pickle
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import syncalgos as sa


class ByPosition(NamedTuple):
    """An algorithm whose first parameters the design names, in their order.

    Attributes:
        parameters: their names.
        values: a value of each, which is not its default.
    """

    parameters: tuple[str, ...]
    values: tuple[Any, ...]


# As the design's list of algorithms has them: bmuf(period, block_momentum, …).
BY_POSITION = {
    "sync_sgd": ByPosition(parameters=(), values=()),
    "model_averaging": ByPosition(parameters=("period",), values=(4,)),
    "post_local_sgd": ByPosition(parameters=("dense_steps", "period"), values=(90, 4)),
    "bmuf": ByPosition(
        parameters=("period", "block_momentum", "block_lr", "nesterov"),
        values=(4, 0.3, 0.8, True),
    ),
    "slowmo": ByPosition(
        parameters=("period", "slow_momentum", "slow_lr", "learning_rate"),
        values=(4, 0.3, 0.8, 0.1),
    ),
    "diloco": ByPosition(
        parameters=("period", "outer_lr", "outer_momentum"), values=(4, 0.3, 0.8)
    ),
    "streaming_diloco": ByPosition(
        parameters=(
            "period",
            "fragments",
            "outer_lr",
            "outer_momentum",
            "delay",
            "alpha",
        ),
        values=(6, 2, 0.3, 0.8, 1, 0.4),
    ),
    "easgd": ByPosition(parameters=("period", "beta"), values=(4, 0.3)),
    "gossip": ByPosition(parameters=("topology",), values=("ring",)),
    "hierarchical": ByPosition(parameters=("period", "inner_period"), values=(8, 2)),
    "scaffold": ByPosition(parameters=("period", "learning_rate"), values=(4, 0.1)),
    "powersgd": ByPosition(parameters=("rank",), values=(3,)),
}
# These have no parameter that a reader knows without its name.
ALL_BY_NAME = {"sync_sgd", "sign_sgd"}


@pytest.mark.parametrize("name", sa.ALGORITHMS)
def test_the_registry_has_the_functions_themselves(name):
    factory = sa.ALGORITHMS[name]
    assert factory is getattr(sa, name)
    assert factory is getattr(import_module(f"syncalgos.algorithms.{name}"), name)
    assert pickle.loads(pickle.dumps(factory)) is factory
    *_, axis = inspect.signature(factory).parameters.values()
    assert (axis.name, axis.default) == ("axis", sa.WORKERS)
    assert axis.kind is axis.KEYWORD_ONLY


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


@pytest.mark.parametrize("name", BY_POSITION)
def test_the_parameters_of_the_design_are_taken_by_position(name):
    factory = sa.ALGORITHMS[name]
    (parameters, values) = BY_POSITION[name]
    by_name = factory(**dict(zip(parameters, values, strict=True)))
    by_position = factory(*values)
    assert repr(by_position) == repr(by_name)
    for parameter, value in zip(parameters, values, strict=True):
        assert f"{parameter}={value!r}" in repr(by_position)
    assert repr(pickle.loads(pickle.dumps(by_position))) == repr(by_name)
    assert by_position.call is not None
    assert repr(by_position.call.repeat(axis="own")) == repr(
        factory(**dict(zip(parameters, values, strict=True)), axis="own")
    )


@pytest.mark.parametrize("name", sa.ALGORITHMS)
def test_the_first_parameters_of_an_algorithm_are_taken_by_position(name):
    factory = sa.ALGORITHMS[name]
    parameters = inspect.signature(factory).parameters
    by_position = [p.name for p in parameters.values() if p.kind is not p.KEYWORD_ONLY]
    assert bool(by_position) != (name in ALL_BY_NAME)
    if name in BY_POSITION:
        assert tuple(by_position) == BY_POSITION[name].parameters
    with pytest.raises(TypeError) as raised:
        factory(*[4] * (len(by_position) + 1))
    [line] = str(raised.value).splitlines()
    assert line.startswith(f"{name} takes {', '.join(by_position) or 'nothing'} by ")
    assert all(parameter in line for parameter in parameters)


@pytest.mark.parametrize("name", sa.ALGORITHMS)
def test_a_docstring_explains_the_parameters_in_the_order_of_the_signature(name):
    factory = sa.ALGORITHMS[name]
    text = (inspect.getdoc(factory) or "").partition("\nArgs:\n")[2]
    section = text.partition("\n\n")[0].splitlines()
    entries = [line for line in section if line[:4].isspace() and line[4] != " "]
    explained = [entry.split(":")[0].strip() for entry in entries]
    assert explained == [*inspect.signature(factory).parameters]
