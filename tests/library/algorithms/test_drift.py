"""The effective rates of the table of algorithms, against what a steady drift shows."""

import csv
import inspect
import re
from pathlib import Path

import numpy as np
import optax
import pytest
from support.tiers import tiers

import syncalgos as sa

WORKERS = 4
LR = 0.02
TABLE = (Path(__file__).parents[3] / "docs/tables/algorithms.csv").read_text("utf-8")
CELLS = {
    row["name"].strip("`"): row["effective rate"]
    for row in csv.DictReader(TABLE.splitlines())
}
# Values of symbols that no argument gives.
KNOWN = {"N": WORKERS, "lr": LR, "speed": 0.75, "period": 16, "H": 16}
OF = {
    "bmuf": {"μ": 1 - 1 / WORKERS},
    "co2": {"Λ": (1 + 5**0.5) / 2},  # Λ = 1 + 1 / Λ
    "heloco": {"ρ": WORKERS**-0.5},
}
WITH = {"decoupled_diloco": {"slowest": 1.0}}


def made(name):
    factory = sa.ALGORITHMS[name]
    given = WITH.get(name, {})
    if "learning_rate" in inspect.signature(factory).parameters:
        given = {**given, "learning_rate": LR}
    return factory(**given)


def stated(name, formula):
    """The value of a formula at the algorithm's defaults."""
    factory = sa.ALGORITHMS[name]
    given = inspect.signature(factory).bind_partial(**WITH.get(name, {}))
    given.apply_defaults()
    listed = re.findall(r"^ +(\w+): ([^\s,]{1,2})[, ]", inspect.getdoc(factory), re.M)
    values = {x: given.arguments.get(argument, LR) for argument, x in listed}
    values = KNOWN | values | OF.get(name, {})
    text = formula.replace("mean(speed)", "speed").replace("^", "**").replace("·", "*")
    text = re.sub(r"(?<=[\w)']) (?=[\w(])", " * ", text).replace("'", "_")
    return eval(text, {k.replace("'", "_"): x for k, x in values.items()})


# The first with each formula.
FIRST = {cell: name for name, cell in reversed(CELLS.items())}.values()


@pytest.mark.parametrize("name", tiers(CELLS, ("qg_dsgdm",), FIRST))
def test_a_steady_drift_goes_as_far_as_the_page_says(name):
    strategy = made(name), optax.sgd(LR)
    params = {"w": np.zeros((4, 3), np.float32)}
    found = sa.effective_rate(
        *strategy, workers=WORKERS, learning_rate=LR, params=params
    ).rate
    cell = CELLS[name].partition(": ")[2] or CELLS[name]
    if not cell:
        assert found is None or found == pytest.approx(LR, rel=1e-2)
    elif most := re.fullmatch(r"(?:up|from 1) to (.*)", cell):
        assert found and 0.5 * LR < found <= LR * stated(name, most[1])
    else:
        assert found == pytest.approx(LR * stated(name, cell), rel=1e-2)
