"""Every public docstring has an example, which prints what it shows."""

import doctest
import inspect

import pytest

import syncalgos

PUBLIC = {name: getattr(syncalgos, name) for name in dir(syncalgos) if name[0] != "_"}
DOCUMENTED = {k: x for k, x in PUBLIC.items() if callable(x)}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_example_prints_what_it_shows(name):
    text = inspect.getdoc(DOCUMENTED[name]) or ""
    test = doctest.DocTestParser().get_doctest(text, {}, name, None, None)
    assert test.examples
    ran = doctest.DocTestRunner(verbose=False)
    told: list[str] = []
    ran.run(test, out=told.append)
    assert not ran.failures, "".join(told)
