"""The table of a report's sentences: each is said, and gets the fields that it has."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from string import Formatter
from typing import Any

import pytest

from experiments.study import analysis, answer, remarks, sentences, settings
from experiments.study.results import Basis, Kind, Standing
from experiments.study.sentences import PHRASES

KINDS_WITHOUT_BASIS = {Kind.BASELINE, Kind.NO_BASELINE, Kind.NO_COMMON_SEED}
BASES = {
    Kind.BETTER: {Basis.INTERVAL},
    Kind.WORSE: {Basis.INTERVAL},
    Kind.AHEAD: {*Basis} - {Basis.INTERVAL},
    Kind.BEHIND: {*Basis} - {Basis.INTERVAL},
    Kind.ABOVE: {*Basis},
    Kind.BELOW: {*Basis},
    Kind.EQUAL: {Basis.ONE_SEED, Basis.BOTH_SEEDS, Basis.ALL_SEEDS},
    Kind.NOT_SEEN: {Basis.INTERVAL, Basis.MEAN},
    Kind.NOT_AFTER_CORRECTION: {Basis.INTERVAL},
}


def test_every_kind_has_a_clause_for_each_basis_and_no_other():
    clauses = PHRASES["clause"]
    assert {*clauses} == {*Kind}
    assert {kind for kind in Kind if isinstance(clauses[kind], str)} == (
        KINDS_WITHOUT_BASIS
    )
    for kind, bases in BASES.items():
        assert {*clauses[kind]} == bases, kind


@pytest.mark.parametrize("kind", BASES)
def test_a_number_says_of_a_difference_what_its_clause_says(kind):
    for basis in BASES[kind]:
        fields = {"row": "a", "baseline": "b", "amount": "", "interval": "[1, 2]"}
        clause = sentences.say(f"clause.{kind}.{basis}", **fields, seeds=4)
        meaning = sentences.say(f"number.{kind}.{basis}", **fields, seeds=4)
        clause = clause.replace(" by ", "").replace(": ", "")
        assert meaning.startswith("a against b: ")
        assert " ".join(meaning.split()[3:]) == " ".join(clause.split())


def test_every_standing_has_a_phrase_and_no_other():
    assert {*PHRASES["standing"]} == {*Standing}
    for phrase in PHRASES["standing"].values():
        assert "{labels}" in phrase


def test_every_other_phrase_is_named_in_the_code():
    names = set()
    for node in walk_code():
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            names |= {node.value, f"{node.value}.one", f"{node.value}.several"}
    assert {*plain_phrases()} - names == set()


def test_every_phrase_that_the_code_says_exists_and_is_passed_its_fields():
    phrases = plain_phrases()
    num_checked = 0
    for call in walk_code():
        if not isinstance(call, ast.Call) or called_name(call) not in SAY:
            continue
        place = call.args[0]
        if not isinstance(place, ast.Constant):
            continue
        passed = {keyword.arg for keyword in call.keywords}
        for suffix in SAY[called_name(call)]:
            phrase = phrases[f"{place.value}{suffix}"]
            fields = {field for _, field, _, _ in Formatter().parse(phrase) if field}
            # None is **fields.
            assert fields <= passed or None in passed, place.value
            num_checked += 1
    assert num_checked > 50


# The functions that say a phrase, and what they add to its place.
SAY = {"say": [""], "say_counted": [".one", ".several"]}


def plain_phrases() -> dict[str, str]:
    """The phrases by their places, except for those of an enumeration or a setting."""
    phrases = {}
    for place, phrase in flatten(PHRASES):
        table, *keys = place.split(".")
        is_of_kind = table == "number" and len(keys) == 2
        if table not in ("clause", "standing", "settings") and not is_of_kind:
            phrases[place] = phrase
    return phrases


def flatten(table: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, str]]:
    """Yields the phrases of a table by their places."""
    for key, phrase in table.items():
        if isinstance(phrase, str):
            yield f"{place}{key}", phrase
        else:
            yield from flatten(phrase, f"{place}{key}.")


def walk_code() -> Iterator[ast.AST]:
    """Yields the nodes of all modules that say phrases."""
    for module in (analysis, answer, remarks, sentences, settings):
        assert module.__file__
        yield from ast.walk(ast.parse(Path(module.__file__).read_text("utf-8")))


def called_name(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else ""
