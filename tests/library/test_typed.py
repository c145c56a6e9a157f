"""The calls for a strict type checker use every public name, and run."""

import ast
from pathlib import Path

import pytest
import typed

import syncalgos


def test_every_public_name_is_used():
    tree = ast.parse(Path(typed.__file__).read_text())
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    used = {node.attr for node in nodes if ast.unparse(node.value) == "sa"}
    public = {name for name in dir(syncalgos) if name[0] != "_"}
    assert used <= public
    # Factories are of one form: a new one need not be here as well.
    assert public - used <= {*syncalgos.ALGORITHMS}


@pytest.mark.slow
def test_what_is_typed_runs():
    center, sent = typed.trained()
    assert center.params["w"].shape == (4,)
    assert sent.syncs == 1
    assert len(typed.trainers()) == 6
    assert all(count > 0 for count in typed.sent())
    assert len(typed.described()) > 8
    assert "all_reduce" in typed.before_it_runs().branched
    assert typed.alone()["w"].shape == (4,)
    assert typed.in_a_stack()["w"].shape == (4,)
