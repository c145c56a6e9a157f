"""Public names are typed: a strict checker reads calls of all, and the calls run."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import typed_calls

import syncalgos


def test_every_public_name_is_used():
    tree = ast.parse(Path(typed_calls.__file__).read_text())
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    used = {node.attr for node in nodes if ast.unparse(node.value) == "sa"}
    public = {name for name in dir(syncalgos) if name[0] != "_"}
    assert used <= public
    # Factories are of one form: a new one need not be here as well.
    assert public - used <= {*syncalgos.ALGORITHMS}


@pytest.mark.slow
def test_the_types_of_public_names_are_known():
    root = Path(syncalgos.__file__).parents[1]
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable]
    command += ["--verifytypes", "syncalgos", "--ignoreexternal", "--outputjson"]
    checked = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    report = json.loads(checked.stdout)["typeCompleteness"]
    assert Path(report["packageRootDirectory"]) == root / "syncalgos"
    unknown = [x["name"] for x in report["symbols"] if not x["isTypeKnown"]]
    assert len(report["symbols"]) > 200
    assert report["completenessScore"] >= 0.99, unknown


@pytest.mark.slow
def test_typed_calls_run():
    center, counts = typed_calls.trained()
    assert center.params["w"].shape == (4,)
    assert counts.syncs == 1
    assert len(typed_calls.trainers()) == 6
    assert all(count > 0 for count in typed_calls.count_bytes())
    assert len(typed_calls.described()) > 8
    assert "all_reduce" in typed_calls.before_it_runs().branched
    assert typed_calls.lengthened() == pytest.approx(2, rel=1e-3)
    assert typed_calls.alone()["w"].shape == (4,)
    assert typed_calls.among_peers().params["w"].shape == (4,)
    assert typed_calls.in_a_stack()["w"].shape == (4,)
