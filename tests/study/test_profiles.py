"""Tests of performance profiles, and of the figure of accuracy against bytes."""

import math

import numpy as np
import pytest
from experiments.study.report.plots import comparisons as tradeoff
from experiments.study.report.plots import profiles as figures
from hypothesis import given
from hypothesis import strategies as st
from reports import NETWORKS, made_up
from scipy.integrate import quad

from benchmarks.harness import atlas
from experiments.cli.errors import BadRequest
from experiments.study.analysis.profiles import MOST, profiles, times_of
from experiments.study.report import tables
from experiments.study.report.styles import styles
from experiments.study.statistics import Spread

NAMES = ("a", "b", "c")
TIME = st.none() | st.floats(0.1, 100)
TIMES = st.dictionaries(
    st.sampled_from(["w1", "w2", "w3", "w4"]),
    st.fixed_dictionaries(dict.fromkeys(NAMES, TIME)),
)


def test_profiles_of_two_workloads():
    found = profiles({"one": {"a": 1.0, "b": 2.0}, "two": {"a": 9.0, "b": 3.0}})
    assert [(x.label, x.ratios) for x in found] == [("b", [1, 2]), ("a", [1, 3])]
    # b: half of the workloads from 1 to 2, then all; a: half from 1 to 3.
    assert [x.score for x in found] == pytest.approx([(0.5 + 2) / 3, (0.5 * 2 + 1) / 3])


def test_a_target_never_reached_is_infinitely_far():
    found = profiles({"one": {"a": 5.0, "b": None}, "two": {"a": None, "b": None}})
    assert [x.ratios for x in found] == [[1.0], [math.inf]]  # nobody reaches two
    assert [x.score for x in found] == [1.0, 0.0]
    assert profiles({"one": {"a": None}}) == []
    assert profiles({}) == []


@given(TIMES)
def test_a_score_is_the_area_under_the_share(times):
    for found in profiles(times):
        steps = [x for x in set(found.ratios) if 1 < x < MOST]
        area, _ = quad(found.share, 1, MOST, points=steps or None, limit=200)
        assert found.score == pytest.approx(area / (MOST - 1), abs=1e-6)


@given(TIMES)
def test_someone_is_the_fastest_of_each_workload(times):
    found = profiles(times)
    reached = sum(any(x is not None for x in own.values()) for own in times.values())
    assert sum(x.ratios.count(1.0) for x in found) >= reached
    assert {x.label for x in found} == (set(NAMES) if reached else set())


def test_a_workload_is_a_network_at_a_point_of_the_sweep():
    rows = made_up(sweep="period").rows
    times = times_of(rows)
    assert len(times) == 3 * len(NETWORKS)
    name = NETWORKS[0].name
    assert times[f"{name} at period=2"] == {
        row.label: row.to_target[name] for row in rows if row.point == "period=2"
    }


def test_the_figure_shows_scores_and_the_best_of_many():
    report = made_up()
    look = styles({row.label: row.algo for row in report.rows})
    (plot,) = figures.plots(report, look)
    assert "over 3 workloads" in plot.note
    assert all(f"{x.label} " in plot.text for x in report.rows)
    labels = [f"a{i}" for i in range(20)]
    many = profiles({w: {x: 1.0 + i for i, x in enumerate(labels)} for w in "uv"})
    plot = figures.plot(many, styles(dict.fromkeys(labels, "a")), "u, v")
    assert plot.note.endswith(f"The {figures.SHOWN} best of 20 are drawn.")
    texts = [x.get_text() for x in plot.draw().legends[0].get_texts()]
    assert [x.partition(" ")[0] for x in texts] == labels[: figures.SHOWN]


def test_one_workload_has_no_figure():
    report = made_up()
    kept = NETWORKS[0].name
    rows = [r._replace(to_target={kept: r.to_target[kept]}) for r in report.rows]
    look = styles({row.label: row.algo for row in rows})
    assert not [*figures.plots(report._replace(rows=rows), look)]


def test_the_atlas_joins_studies(tmp_path, capsys):
    for name, fast in ("atlas-one", "bmuf --nesterov"), ("atlas-two", "diloco"):
        (tmp_path / name).mkdir()
        report = made_up(labels={fast: "fast"})
        (tmp_path / name / "table.csv").write_text(tables.csv(report))
    out = tmp_path / "atlas"
    atlas.main([*map(str, sorted(tmp_path.glob("atlas-*"))), "--out", str(out)])
    head, _, *lines = capsys.readouterr().out.splitlines()
    names = [network.name for network in NETWORKS]
    assert head == f"| algorithm | one | two | sends | score | {' | '.join(names)} |"
    # Five names: a label that one study lacks has not reached its target.
    assert len(lines) == 5
    cells = {x.split("|")[1].strip(" `"): x.split("|") for x in lines}
    assert cells["diloco"][3].strip() == ""
    assert cells["sync_sgd"][4].strip() == "1"
    assert "1 of 5 diverged" in cells["slowmo --slow-momentum 0.95"][2]
    assert "<title>fast: " in (out / "profiles.svg").read_text()


def test_an_atlas_has_a_line_an_algorithm(tmp_path):
    (tmp_path / "table.csv").write_text(tables.csv(made_up(sweep="period")))
    with pytest.raises(BadRequest, match="sweeps a flag"):
        atlas.read(tmp_path)


def ends(*values):
    """A report of one algorithm per pair of bytes and accuracy: a0, a1 …"""
    report = made_up()
    rows = [
        report.rows[0]._replace(
            label=f"a{i}",
            algo=f"a{i}",
            bytes_per_worker=sent,
            measure=Spread(mean, 0.01, 5),
        )
        for i, (sent, mean) in enumerate(values)
    ]
    return report._replace(rows=rows), styles({row.label: row.algo for row in rows})


def labels(figure):
    """The labels in the legend of a figure."""
    return {x.get_text() for x in figure.legends[0].get_texts()}


FEW = (10.0, 0.7), (20.0, 0.9), (20.0, 0.8), (40.0, 0.85), (80.0, 0.95)


def test_the_front_is_of_those_that_nobody_beats_with_as_few_bytes():
    (plot,) = tradeoff.plots(*ends(*FEW))
    assert "no other beats with as few bytes (a0, a1, a4)" in plot.note
    figure = plot.draw()
    assert labels(figure) == {f"a{i}" for i in range(5)}
    front = np.asarray(figure.axes[0].lines[-1].get_xydata())
    assert front[:-1, 0].tolist() == [10, 20, 80]
    assert front[:, 1] == pytest.approx([70, 90, 95, 95])


def test_less_is_better_of_a_loss():
    report, look = ends(*FEW)
    measure = report.measure._replace(higher_is_better=False)
    (plot,) = tradeoff.plots(report._replace(measure=measure), look)
    assert "(a0)" in plot.note


def test_of_many_points_the_front_has_labels_and_the_hopeless_are_named():
    crowd = [(100.0 + i, 0.90) for i in range(12)]
    (plot,) = tradeoff.plots(*ends(*FEW, *crowd, (50.0, 0.1), (5.0, 0.2)))
    assert labels(plot.draw()) == {"a18", "a0", "a1", "a4"}
    # The least bytes are at the front however bad.
    assert plot.note.endswith("Outside the picture: a17: 10.00 ± 1.00 %, 50 B.")


def test_nothing_is_left_out_of_few_points_or_within_the_bars():
    close = [(100.0 + i, 0.987 + i / 1e4) for i in range(4)]
    (plot,) = tradeoff.plots(*ends((10.0, 0.961), *close))
    assert "Outside" not in plot.note
    many = [(100.0 + i, 0.987 + i / 1e4) for i in range(12)]
    # Bars of 0.01 reach to 0.977: the one lies within them, the other does not.
    (plot,) = tradeoff.plots(*ends(*many, (200.0, 0.978), (201.0, 0.9)))
    assert plot.note.endswith("Outside the picture: a13: 90.00 ± 1.00 %, 201 B.")


@pytest.mark.parametrize("sent", [(10.0, 10.0, 20.0), (None, None, 20.0), (0.0, 5, 9)])
def test_two_amounts_of_bytes_are_no_trade_off(sent):
    assert not [*tradeoff.plots(*ends(*((x, 0.9) for x in sent)))]
