"""The suite itself: which tests a run has, and in which tier they are."""

import tomllib
from pathlib import Path

import pytest
from commands import ROOT

SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def test_every_test_lies_below_a_path_that_is_run():
    paths = SETTINGS["tool"]["pytest"]["ini_options"]["testpaths"]
    for file in (ROOT / "tests").rglob("test_*.py"):
        below = file.relative_to(ROOT)
        assert any(below.is_relative_to(Path(path)) for path in paths), below


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", range(5))
def test_sample_leaves_all_but_so_many_cases_to_the_slow_run(case, request):
    kept = request.node.get_closest_marker("slow") is None
    assert kept == (case in (0, 2) or bool(request.config.option.keyword))
