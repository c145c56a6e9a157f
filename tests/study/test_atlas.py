"""The tables of the atlas: verdicts by the preset's rule, and equal times."""

import math
from typing import NamedTuple

import pytest
from scipy import stats
from support.sample_report import made_up

from benchmarks.harness import atlas
from experiments.study.results import Comparison, Curve, Kind, Report
from experiments.study.statistics import ACCURACY, LOSS, Band, Difference, Measure


class VerdictCase(NamedTuple):
    """The 95 % interval of a row's difference, and the verdict on the row."""

    measure: Measure
    low: float
    high: float
    expected: str


def make_verdict_report(case: VerdictCase, num_others: int = 0) -> Report:
    """A baseline, a row `a` with the case's interval, and rows of other differences."""
    seeds = 25
    report = made_up()
    rows = [report.rows[0]._replace(label=atlas.REFERENCE)]

    def add(label: str, low: float, high: float) -> None:
        deviation = math.sqrt(seeds) * (high - low) / 2 / stats.t.ppf(0.975, seeds - 1)
        difference = Difference((low + high) / 2, low, high, deviation, seeds, False)
        comparison = Comparison(Kind.NOT_SEEN, difference=difference)
        row = report.rows[1]._replace(label=label, comparison=comparison, diverged=0)
        rows.append(row)

    add("a", case.low, case.high)
    for number in range(num_others):
        add(f"other {number}", -1.0, 1.0)
    return report._replace(rows=rows, measure=case.measure)


@pytest.mark.parametrize(
    VerdictCase._fields,
    [
        VerdictCase(measure=ACCURACY, low=-0.004, high=0.002, expected="no loss"),
        VerdictCase(measure=ACCURACY, low=-0.006, high=0.002, expected="not resolved"),
        # A loss is seen, which is smaller than the margin.
        VerdictCase(measure=ACCURACY, low=-0.004, high=-0.001, expected="no loss"),
        VerdictCase(measure=ACCURACY, low=-0.02, high=-0.001, expected="a loss"),
        VerdictCase(measure=ACCURACY, low=0.001, high=0.02, expected="a gain"),
        VerdictCase(measure=LOSS, low=-0.01, high=0.019, expected="no loss"),
        VerdictCase(measure=LOSS, low=-0.01, high=0.021, expected="not resolved"),
        VerdictCase(measure=LOSS, low=0.01, high=0.03, expected="a loss"),
        VerdictCase(measure=LOSS, low=-0.03, high=-0.01, expected="a gain"),
    ],
)
def test_a_verdict_follows_the_rule_of_the_preset(measure, low, high, expected):
    report = make_verdict_report(VerdictCase(measure, low, high, expected))
    assert atlas.find_verdicts(report) == {atlas.REFERENCE: "", "a": expected}


def test_a_verdict_is_corrected_for_the_number_of_rows():
    """By Holm: the p-value of this interval is near 0.03, and that of three is not."""
    case = VerdictCase(ACCURACY, -0.02, -0.001, "a loss")
    assert atlas.find_verdicts(make_verdict_report(case))["a"] == "a loss"
    verdicts = atlas.find_verdicts(make_verdict_report(case, num_others=2))
    assert verdicts["a"] == "not resolved"


def test_a_row_with_a_lost_run_has_no_verdict_of_no_loss():
    report = make_verdict_report(VerdictCase(ACCURACY, -0.004, 0.002, "no loss"))
    baseline, row = report.rows
    lost = report._replace(rows=[baseline, row._replace(diverged=1)])
    assert atlas.find_verdicts(lost)["a"] == "not resolved"


def test_a_row_has_its_bytes_difference_and_tuned_values():
    report = made_up()
    head, _, *lines = atlas.best_table(report)
    assert head.startswith("| algorithm | bytes | accuracy | difference | rate |")
    assert len(lines) == sum(x.result is not None for x in report.rows)
    cells_by_label = {}
    for line in lines:
        label = line.split("`")[1]
        cells_by_label[label] = [cell.strip() for cell in line.split("|")[2:-1]]
    sync_cells = cells_by_label["sync_sgd"]
    assert (sync_cells[0], sync_cells[2], sync_cells[-1]) == ("1", "", "")
    means = [float(x[1].split(" ")[0]) for x in cells_by_label.values()]
    assert means == sorted(means, reverse=True)


def test_all_have_the_time_of_averaging():
    """On the slow link sync_sgd has made half of its steps by then."""

    def curve(label, *seconds):
        mean = [0.1, 0.4, 0.9]
        band = Band(mean, [x - 0.01 for x in mean], [x + 0.01 for x in mean])
        clocks = dict(zip(("dsl", "10gbe"), seconds, strict=True))
        return Curve(label, "", [10, 20, 30], {"test_accuracy": band}, None, clocks)

    averaging = curve(atlas.CLOCK, [2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    sync = curve("sync_sgd", [3.0, 6.0, 9.0], [1.0, 2.0, 3.0])
    curves = averaging, sync, curve("late", [7.0, 14.0, 21.0], [1.0, 2.0, 3.0])
    rows = [made_up().rows[0]._replace(label=x.label) for x in curves]
    report = made_up()._replace(curves=curves, rows=rows)
    head, _, *lines = atlas.equal_time_table(report, ["dsl", "10gbe"])
    assert head == "| algorithm | DSL, 6 s | 10 GbE, 3 s |"
    final_accuracy = "90.0"
    assert lines == [
        f"| `{atlas.CLOCK}` | {final_accuracy} | {final_accuracy} |",
        f"| `sync_sgd` | 40.0 (20) | {final_accuracy} |",
        f"| `late` | | {final_accuracy} |",
    ]


def test_a_table_as_csv_has_cells_of_markdown():
    table = ["| a | b | c |", "| --- | --: | --- |", "| `x` | | 0.5 [0.0, 0.9] \\* |"]
    assert atlas.format_csv(table) == 'a,b,c\n`x`,,"0.5 [0.0, 0.9] *"\n'
