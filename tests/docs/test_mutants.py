"""The list of mutants fits the code; `make mutants` tries them."""

import ast
from functools import cache
from pathlib import Path

from mutants import algorithms, mutants, stages
from support.commands import ROOT

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
