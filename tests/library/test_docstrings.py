"""Every public docstring has an example, which prints what it shows."""

import doctest
import inspect

import pytest
from support.tiers import tiers

import syncalgos

PUBLIC = {name: getattr(syncalgos, name) for name in dir(syncalgos) if name[0] != "_"}
DOCUMENTED = {k: x for k, x in PUBLIC.items() if callable(x)}
# A class, an algorithm and a combinator: all are read and run by the same few lines.
DEFAULT_NAMES = "Strategy", "model_averaging", "delayed"


def examples(name: str) -> doctest.DocTest:
    text = inspect.getdoc(DOCUMENTED[name]) or ""
    return doctest.DocTestParser().get_doctest(text, {}, name, None, None)


def test_every_public_docstring_has_an_example():
    assert all(examples(name).examples for name in DOCUMENTED)


@pytest.mark.parametrize("name", tiers(DOCUMENTED, DEFAULT_NAMES))
def test_example_prints_what_it_shows(name):
    runner = doctest.DocTestRunner(verbose=False)
    printed_parts: list[str] = []
    runner.run(examples(name), out=printed_parts.append)
    assert not runner.failures, "".join(printed_parts)
