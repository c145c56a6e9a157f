"""The list of mutants fits the code; `make mutants` tries them."""

import ast
from functools import cache
from pathlib import Path

import pytest
from commands import ROOT
from mutants import algorithms, importers, mutants, stages

MUTANTS = mutants()


@cache
def tree(text):
    """A program as its syntax alone, which no comment changes."""
    return ast.dump(ast.parse(text))


def test_each_mutant_is_a_mistake_in_one_place():
    for mutant in MUTANTS:
        text = (ROOT / mutant.file).read_text("utf-8")
        assert tree(mutant.applied(text)) != tree(text), mutant


def test_every_algorithm_has_a_mutant():
    assert {*algorithms()} <= {Path(mutant.file).stem for mutant in MUTANTS}


def test_each_mutant_has_tests_that_exist():
    for mutant in MUTANTS:
        for test in mutant.tests:
            file, _, name = test.partition("::")
            assert f"def {name}" in (ROOT / file).read_text("utf-8"), test
        assert any(map(any, stages(mutant, ()))), mutant
        assert not mutant.algorithm or mutant.algorithm in algorithms()


@pytest.mark.parametrize(
    ("file", "test"),
    [
        ("syncalgos/combinators/delayed.py", "library/combinators/test_delays.py"),
        ("syncalgos/reducers/sparse.py", "library/reducers/test_row_sparse.py"),
        ("syncalgos/algorithms/bmuf.py", "library/algorithms/test_identities.py"),
        ("experiments/study/statistics.py", "study/test_statistics.py"),
        ("syncalgos/engine/data_parallel.py", "library/combinators/test_averages.py"),
    ],
)
def test_names_of_packages_lead_to_their_files(file, test):
    found = importers(file)
    assert f"tests/{test}" in found
    assert "tests/docs/test_claims.py" not in found
