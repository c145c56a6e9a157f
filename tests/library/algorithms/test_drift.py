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
COMMON_SYMBOLS = {"N": WORKERS, "lr": LR, "speed": 0.75, "period": 16, "H": 16}
SYMBOLS_BY_NAME = {
    "bmuf": {"μ": 1 - 1 / WORKERS},
    "co2": {"Λ": (1 + 5**0.5) / 2},  # Λ = 1 + 1 / Λ
    "heloco": {"ρ": WORKERS**-0.5},
}
SETTINGS_BY_NAME = {"decoupled_diloco": {"slowest": 1.0}}


def make_strategy(name: str) -> sa.Strategy:
    factory = sa.ALGORITHMS[name]
    settings = SETTINGS_BY_NAME.get(name, {})
    if "learning_rate" in inspect.signature(factory).parameters:
        settings = {**settings, "learning_rate": LR}
    return factory(**settings)


def evaluate_formula(name: str, formula: str) -> float:
    """The value of a formula at the algorithm's defaults."""
    factory = sa.ALGORITHMS[name]
    call = inspect.signature(factory).bind_partial(**SETTINGS_BY_NAME.get(name, {}))
    call.apply_defaults()
    doc = inspect.getdoc(factory)
    arguments_and_symbols = re.findall(r"^ +(\w+): ([^\s,]{1,2})[, ]", doc, re.M)
    values = {
        symbol: call.arguments.get(argument, LR)
        for argument, symbol in arguments_and_symbols
    }
    values = COMMON_SYMBOLS | values | SYMBOLS_BY_NAME.get(name, {})
    text = formula.replace("mean(speed)", "speed").replace("^", "**").replace("·", "*")
    text = re.sub(r"(?<=[\w)']) (?=[\w(])", " * ", text).replace("'", "_")
    return eval(text, {k.replace("'", "_"): x for k, x in values.items()})


# The first with each formula.
FIRST_NAMES = {cell: name for name, cell in reversed(CELLS.items())}.values()


@pytest.mark.parametrize("name", tiers(CELLS, ("qg_dsgdm",), FIRST_NAMES))
def test_a_steady_drift_goes_as_far_as_the_page_says(name):
    rate = sa.effective_rate(
        make_strategy(name),
        optax.sgd(LR),
        workers=WORKERS,
        learning_rate=LR,
        params={"w": np.zeros((4, 3), np.float32)},
    ).rate
    cell = CELLS[name].partition(": ")[2] or CELLS[name]
    upper_bound = re.fullmatch(r"(?:up|from 1) to (.*)", cell)
    if not cell:
        assert rate is None or rate == pytest.approx(LR, rel=1e-2)
    elif upper_bound:
        assert rate and 0.5 * LR < rate <= LR * evaluate_formula(name, upper_bound[1])
    else:
        assert rate == pytest.approx(LR * evaluate_formula(name, cell), rel=1e-2)
