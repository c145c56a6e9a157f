"""The suite itself: which tests a run has, and in which tier they are."""

import tomllib

import pytest
from commands import ROOT
from conftest import spread_evenly

SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def test_every_test_lies_below_a_path_that_is_run():
    paths = SETTINGS["tool"]["pytest"]["ini_options"]["testpaths"]
    places = [place for path in paths for place in ROOT.glob(path)]
    for file in (ROOT / "tests").rglob("test_*.py"):
        assert any(file.is_relative_to(place) for place in places), file


def test_sample_keeps_so_many_cases_evenly_spread():
    assert spread_evenly(5, 2) == {0, 2}
    assert spread_evenly(9, 3) == {0, 3, 6}
    assert spread_evenly(2, 4) == {0, 1}


@pytest.mark.sample(1, slow=2)
@pytest.mark.parametrize("case", range(5))
def test_so_many_of_the_others_are_slow_and_the_rest_long(case, request):
    keyword = bool(request.config.option.keyword)
    is_alone = f"[{case}]" in " ".join(request.config.args)
    tiers = {x.name for x in request.node.iter_markers()} & {"slow", "long"}
    expected = [set(), {"slow"}, {"long"}, {"slow"}, {"long"}][case]
    assert is_alone or keyword or tiers == expected


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", range(5))
def test_other_cases_are_left_to_the_slow_run(case, request):
    keyword = bool(request.config.option.keyword)  # who chooses by it gets all cases
    is_alone = f"[{case}]" in " ".join(request.config.args)
    is_slow = request.node.get_closest_marker("slow") is not None
    assert is_alone or is_slow != (case in spread_evenly(5, 2) or keyword)
