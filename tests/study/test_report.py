"""A study's report: its page, its figures, its tables and its event files."""

import csv
import io
import itertools
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgba
from support.commands import find_imports
from support.sample_report import ALGORITHMS, NETWORKS, made_up

from experiments.study import figures
from experiments.study import page as pages
from experiments.study.figures import COLOURS, styles
from experiments.study.results import Comparison, Kind, Report
from experiments.study.statistics import LOSS, Band, Difference, Spread

GOLDEN = Path(__file__).with_name("golden")
VOID = {"meta", "link", "br", "img", "hr", "input"}
NASTY = "<script>alert(\"1\")</script> & 'x' | $y_$"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The files of the report for one network."""
    out = tmp_path_factory.mktemp("report")
    pages.write_report(made_up()._replace(networks=NETWORKS[:1]), out)
    return out


@pytest.fixture(scope="module")
def page(folder):
    """The page of the report as it is."""
    return Page((folder / "report.html").read_text())


class Page(HTMLParser):
    """A page's tags, attributes and text; fails where tags do not match."""

    def __init__(self, text):
        super().__init__()
        self.text = text
        self.open = []
        self.tags = []
        self.words = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] != "style":
            self.words.append(data)

    def find_attributes(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]

    def join_words(self, between=" "):
        """All words, with single spaces."""
        return " ".join(between.join(self.words).split())


def plotted(report: Report):
    """The figures of a report as data, by name."""
    return {plot.name: plot for plot in figures.plots(report)}


def drawn(report: Report, *names):
    """The figures of a report as they are drawn, by name: these, or all."""
    look = styles({row.label: row.algo for row in report.rows})
    plots = plotted(report)
    with figures.style():
        return {x: figures.draw(plots[x], look) for x in names or plots}


def find_lines(axes, label):
    """The data of the lines of an algorithm in a panel, without marks."""
    algorithm_lines = [x for x in axes.lines if x.get_color() == find_colour(label)]
    return [x.get_xydata().astype(float) for x in algorithm_lines if x.get_clip_on()]


def find_bars(axes, column, label=None):
    """The ends of the bars in a panel along x or y, of an algorithm or of all."""
    bars = [x for x in axes.collections if isinstance(x, LineCollection)]
    colour = None if label is None else to_rgba(find_colour(label))
    bars = [x for x in bars if colour is None or tuple(x.get_color()[0]) == colour]
    segments = itertools.chain.from_iterable(x.get_segments() for x in bars)
    return [tuple(np.sort(segment[:, column])) for segment in segments]


def tick_texts(axes):
    """The words below a panel."""
    return [x.get_text() for x in axes.get_xticklabels()]


def make_page(report):
    """The page of a report, without its drawings."""
    plots = plotted(report)
    return Page(
        pages.render_page(report, [*plots.values()], dict.fromkeys(plots, "<svg/>"))
    )


@pytest.fixture(scope="module")
def usual():
    """The figures of the report as it is."""
    return drawn(made_up())


def find_colour(label):
    """The colour of an algorithm among those of a report."""
    return styles({name: name.split()[0] for name in ALGORITHMS})[label]["color"]


def replaced(report, key, values, *which):
    """The report of which some curves have other means, and no bands, for a metric."""
    curves = list(report.curves)
    for i in which:
        bands = {**curves[i].bands, key: Band(values, values, values)}
        curves[i] = curves[i]._replace(bands=bands)
    return report._replace(curves=curves)


def test_a_report_is_a_page_two_tables_and_each_figure_twice(folder, page):
    names = {str(path.relative_to(folder)) for path in folder.rglob("*.*")}
    figures = {name for name in names if name.startswith("figures/")}
    paper = {f"paper/{x}" for x in ("table.tex", "differences.pdf", "differences.svg")}
    assert names - figures == {"report.html", "table.md", "table.csv", *paper}
    stems = Counter(name[8:].rpartition(".")[0] for name in figures)
    assert set(stems.values()) == {2}
    assert {"differences", "tuning-lr", "test-accuracy-by-steps"} <= {*stems}
    # steps, bytes and a network, and at the end by bytes
    assert sum("test-accuracy" in stem for stem in stems) == 4
    assert len(page.find_attributes("figure")) == len(stems)


def test_the_page_asks_for_no_other_file(page):
    assert not page.find_attributes("script") and not page.find_attributes("img")
    for _, attrs in page.tags:
        for key in ("src", "href", "xlink:href", "data", "action"):
            assert attrs.get(key, "#").startswith(("#", "data:,"))
    assert not re.search(r"url\((?!#)|@import", page.text)
    policy = page.find_attributes("meta")[2]
    assert policy["http-equiv"] == "Content-Security-Policy"
    assert policy["content"].startswith("default-src 'none'")


def test_csv_table_is_the_golden_one():
    """pandas reads its columns. To change it, delete the file and read the new one."""
    text = pages.csv(made_up())
    golden = GOLDEN / "table.csv"
    if not golden.exists():
        golden.write_text(text, "utf-8")
        pytest.fail(f"{golden} is new")
    assert text == golden.read_text("utf-8")


# Mean and deviation in %, and 400, 25 or 12 syncs of 103.5 kB, as in sample_report.py.
CELLS = {
    "sync_sgd": ("97.24", "0.21", "baseline", "41.4 MB"),
    "bmuf --nesterov": ("97.48", "0.19", "no difference seen", "2.587 MB"),
    "diloco": ("96.91", "0.34", "worse by 0.3 points", "1.242 MB"),
    "slowmo --slow-momentum 0.95": ("95.52", "1.21", "1 run diverged", "2.587 MB"),
}


@pytest.mark.parametrize("label", CELLS)
def test_a_row_has_its_figures_on_the_page_and_in_both_tables(label):
    report = made_up()
    page_text = make_page(report).join_words()
    markdown_lines = pages.render_markdown(report).splitlines()
    [markdown_row] = [x for x in markdown_lines if x.startswith(f"| {label} |")]
    latex_lines = pages.latex(report, None).splitlines()
    [latex_row] = [x for x in latex_lines if x.startswith(f"{pages.tex(label)} &")]
    for cell in CELLS[label]:
        assert cell in markdown_row
        assert cell in latex_row
        assert cell in page_text


def test_a_label_makes_no_link_and_turns_no_line_in_markdown():
    line = pages.one_line("[x](javascript:alert) \u202etxet\u202c <b>\n y")
    assert line == "[x]\\(javascript:alert) txet &lt;b> y"


def test_page_and_markdown_have_the_headline_and_every_remark():
    report = made_up()
    page_text = make_page(report).join_words("")
    markdown = pages.render_markdown(report)
    assert report.headline in markdown
    assert " ".join(report.headline.split()) in page_text.replace("\u00a0", " ")
    for remark in report.remarks:
        assert remark in markdown
        assert remark in page_text.replace("\u00a0", " ")


def test_figures_show_the_numbers_of_the_table(usual):
    report = made_up()
    for row, curve in zip(report.rows, report.curves, strict=True):
        steps = np.array(curve.steps)
        label = row.label
        mean = 100 * np.array(curve.bands["test_accuracy"].mean)
        views = {"steps": steps, "bytes": np.array(curve.bytes_per_worker)}
        views |= {"time-10-gbe": np.array(curve.seconds["10 GbE"])}
        for view, x in views.items():
            (line,) = find_lines(usual[f"test-accuracy-by-{view}"].axes[0], label)
            assert np.isnan(line[x == 0, 0]).all()  # not on a logarithmic axis
            assert line[x > 0] == pytest.approx(np.stack([x, mean], axis=1)[x > 0])
        (axes,) = usual["test-accuracy-at-the-end"].axes
        (point,) = find_lines(axes, label)
        final, deviation, _ = 100 * np.array(row.result, float)
        assert point == pytest.approx(np.array([[row.bytes_per_worker, final]]))
        ends = final - deviation, final + deviation
        assert find_bars(axes, 1, label) == [pytest.approx(ends)]
        (axes,) = usual["differences"].axes
        difference = row.comparison.difference
        points = [x[0, 0] for x in find_lines(axes, label)]
        if difference is None:
            assert points == find_bars(axes, 0, label) == []
            continue
        mean, *ends = 100 * np.array(difference[:3], float)
        assert points == [pytest.approx(mean)]
        assert find_bars(axes, 0, label) == [pytest.approx(ends)]


@pytest.mark.parametrize("sweep", ["", "workers"])
def test_a_chosen_trial_has_a_ring_and_a_diverged_one_a_cross(sweep):
    report = made_up(sweep)._replace(networks=[])
    (figure,) = drawn(report, "tuning-lr").values()
    figure.draw_without_rendering()
    panels = {axes.get_title("left").replace(" ", "="): axes for axes in figure.axes}
    assert len(panels) == (3 if sweep else 1)
    crosses = 0
    for tuning in report.tuning:
        axes = panels[tuning.point]
        values = np.array(tuning.values)
        scores = 100 * np.array(tuning.scores, float)
        trials = np.stack([values, scores], axis=1)
        diverged_values = values[np.isnan(scores)]
        (line,) = find_lines(axes, tuning.label)
        assert line == pytest.approx(trials, nan_ok=True)
        algorithm_lines = [
            x for x in axes.lines if x.get_color() == find_colour(tuning.label)
        ]
        marks = {str(x.get_marker()): x for x in algorithm_lines if not x.get_clip_on()}
        ring = marks.pop("o").get_xydata()
        assert ring == pytest.approx(trials[values == tuning.chosen])
        assert {*marks} == ({"x"} if len(diverged_values) else set())
        if marks:
            places = marks["x"].get_transform().transform(marks["x"].get_xydata())
            assert np.array_equal(marks["x"].get_xydata()[:, 0], diverged_values)
            row = [*dict.fromkeys(x.label for x in report.tuning)].index(tuning.label)
            row_height = (
                axes.bbox.y0 + 0.035 * row * axes.bbox.height
            )  # none hides another
            assert places[:, 1] == pytest.approx(row_height)
            crosses += 1
    assert crosses == len(panels)
    assert "× at the bottom: a run has no score." in plotted(report)["tuning-lr"].note


def test_bars_of_too_few_seeds_for_an_interval_are_deviations_and_said_to_be():
    report = made_up(tuned=False)._replace(networks=[])
    difference = Difference(1, None, None, 2, 4, False)
    row = report.rows[2]
    rows = list(report.rows)
    rows[2] = row._replace(comparison=row.comparison._replace(difference=difference))
    unsure = report._replace(rows=rows)
    assert plotted(report)["differences"].note == ""
    assert plotted(unsure)["differences"].note.endswith("to each side: diloco.")
    (axes,) = drawn(unsure, "differences")["differences"].axes
    assert find_bars(axes, 0, "diloco") == [pytest.approx((-100, 300))]


@pytest.mark.slow
@pytest.mark.parametrize("sweep", ["", pytest.param("workers", marks=pytest.mark.slow)])
def test_every_line_is_named_in_a_legend_that_fits(sweep):
    long = {"diloco": "diloco --outer-momentum 0.9 --outer-lr 0.7 --period 64"}
    report = made_up(sweep, labels=long)._replace(networks=NETWORKS[:1])
    for name, figure in drawn(report).items():
        if name == "differences":
            continue
        figure.draw_without_rendering()
        (legend,) = figure.legends
        if name.startswith("test-accuracy-by-b"):
            assert legend.get_texts()[-1].get_text() == "target 95 %"
        words = [" ".join(x.get_text().split()) for x in legend.get_texts()]
        for label in ("bmuf --nesterov", long["diloco"]):
            assert any(label in x for x in words), name
        box = legend.get_window_extent()
        page_box = figure.bbox
        assert box.x0 >= 0 and box.x1 <= page_box.x1 and box.y0 >= 0
        for axes in figure.axes:
            assert axes.bbox.height > 100 and not axes.bbox.overlaps(box), name
            looks = {(x.get_color(), x.get_marker()) for x in axes.lines}
            signs = {(x.get_color(), x.get_marker()) for x in legend.get_lines()}
            assert len(signs) >= 3 and signs <= looks, name


def test_ids_are_unique_in_the_page_and_references_find_them(page):
    ids = Counter(attrs["id"] for _, attrs in page.tags if "id" in attrs)
    assert set(ids.values()) == {1}
    referred = set(re.findall(r"url\(#([^)]+)\)", page.text))
    for _, attrs in page.tags:
        referred |= set(attrs.get("aria-labelledby", "").split())
        referred |= {attrs[key] for key in ("for", "aria-describedby") if key in attrs}
        referred |= {attrs[key][1:] for key in ("xlink:href", "href") if key in attrs}
    referred.discard("ata:,")  # the icon
    assert referred <= set(ids)
    assert len(referred) > len(page.find_attributes("svg"))


@pytest.mark.slow
def test_labels_cannot_become_tags_and_end_no_cell_early(tmp_path, monkeypatch):
    plots = figures.plots
    names = ("differences", "test-accuracy-by-steps")

    def two_plots(report):
        return [x for x in plots(report) if x.name in names]

    monkeypatch.setattr(figures, "plots", two_plots)
    labels = {"diloco": NASTY, "sync_sgd": 'a" onload="x', "bmuf --nesterov": "b\nc"}
    labels["slowmo --slow-momentum 0.95"] = odd = '#1c2024 0.12345 id="a'
    pages.write_report(made_up(labels=labels)._replace(networks=[]), tmp_path)
    page = Page((tmp_path / "report.html").read_text())
    assert not page.find_attributes("script")
    for _, attributes in page.tags:
        assert not any(key.startswith("on") for key in attributes)
    assert NASTY in page.join_words()
    assert odd in page.words  # in a legend: no colour, no long number and no id
    table = (tmp_path / "table.md").read_text()
    assert "<script" not in table
    rows = [x for x in table.splitlines() if x.startswith("|")]
    assert len(rows) == 2 + len(ALGORITHMS) and any("| b c |" in row for row in rows)
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1
    table = (tmp_path / "paper" / "table.tex").read_text()
    rows = re.findall(r"(.*) \\\\\n", table)
    assert [len(re.findall(r"(?<!\\)&", x)) for x in rows] == [6] * (
        1 + len(ALGORITHMS)
    )
    assert not re.search(r"(?<!\\)[#_]|[<>|]", "".join(rows))


def test_a_sweep_has_a_panel_and_a_group_of_rows_for_each_value():
    report = made_up(sweep="workers")._replace(networks=[])
    by_bytes = "test-accuracy-by-bytes"
    by_workers = "test-accuracy-by-workers"
    figures = drawn(report, "differences", by_bytes, by_workers)
    assert len(figures[by_bytes].axes) == 3
    (axes,) = figures[by_workers].axes
    assert tick_texts(axes) == ["2", "4", "8"]
    groups = [
        x
        for x in make_page(report).find_attributes("th")
        if x.get("scope") == "rowgroup"
    ]
    assert len(groups) == 3
    rows = csv.DictReader(io.StringIO(pages.csv(report), newline=""))
    assert [row["workers"] for row in rows] == ["2"] * 4 + ["4"] * 4 + ["8"] * 4


def test_a_law_is_the_best_value_and_its_interval_at_every_swept_value():
    report = made_up(sweep="workers")._replace(networks=[])
    tunings = [x._replace(low=x.chosen / 2, high=x.chosen * 2) for x in report.tuning]
    report = report._replace(tuning=tunings)
    name = "best-lr-by-workers"
    (axes,) = drawn(report, name)[name].axes
    assert tick_texts(axes) == ["2", "4", "8"]
    assert axes.get_yscale() == "log"
    for label in ("sync_sgd", "diloco"):
        (best_line,) = find_lines(axes, label)
        assert list(best_line[:, 1]) == [x.chosen for x in tunings if x.label == label]
    assert {(tuning.low, tuning.high) for tuning in tunings} == {*find_bars(axes, 1)}


def test_what_is_not_swept_is_drawn_beside_every_value():
    report = made_up(sweep="period", tuned=False)._replace(networks=[])
    swept_rows = [row for row in report.rows if row.label != "sync_sgd"]
    swept_curves = [curve for curve in report.curves if curve.label != "sync_sgd"]
    report = report._replace(
        rows=[report.rows[0]._replace(point=""), *swept_rows],
        curves=[report.curves[0]._replace(point=""), *swept_curves],
    )
    names = "test-accuracy-by-steps", "test-accuracy-by-period"
    by_steps, by_period = drawn(report, *names).values()
    assert [len(find_lines(x, "sync_sgd")) for x in by_steps.axes] == [1, 1, 1]
    (axes,) = by_period.axes
    assert tick_texts(axes) == ["2", "4", "8"]
    (across,) = find_lines(axes, "sync_sgd")
    assert across[:, 1] == pytest.approx([97.24] * 3)


def test_replicas_that_agree_throughout_are_said_to_and_not_drawn():
    report = made_up()._replace(networks=[])
    report = replaced(report, "divergence", [0.0] * 20, *range(len(ALGORITHMS)))
    assert "divergence-by-steps" not in plotted(report)
    note = "Zero at every evaluation, so not drawn: spread of the replicas."
    assert note in make_page(report).join_words()


def test_a_run_that_diverges_leaves_the_axes_as_they_were(usual):
    steps = np.arange(len(made_up().curves[1].steps))
    wild = [*(2.0 * 10.0 ** steps[:-2]), float("inf"), float("nan")]
    wilder = replaced(made_up(), "test_loss", wild, 1)
    names = "test-loss-by-steps", "test-loss-by-time-10-gbe"
    wild_figures = drawn(wilder, *names)
    notes = plotted(wilder)
    for name in names:
        top = usual[name].axes[0].get_ylim()[1]
        assert wild_figures[name].axes[0].get_ylim()[1] < 2 * top
        note = "Not in the picture, at least at the end: bmuf --nesterov."
        assert notes[name].note == note
        assert plotted(made_up())[name].note == ""


def test_a_measure_below_0_throughout_is_not_said_to_be_cut_off():
    report = made_up()._replace(networks=[])
    every = range(len(ALGORITHMS))
    report = replaced(report, "displacement_cosine", [-0.31, *[-0.3] * 19], *every)
    plot = plotted(report)["displacement-cosine-by-steps"]
    assert plot.limits
    low, high = plot.limits
    assert low < -0.31 and -0.3 < high < 0
    assert plot.note == ""


def test_a_target_of_0_is_drawn():
    report = made_up()._replace(networks=[], measure=LOSS, target=0.0)
    for curve in range(len(ALGORITHMS)):
        losses = np.linspace(1.0, -0.5, 20).tolist()
        report = replaced(report, "test_loss", losses, curve)
    assert plotted(report)["test-loss-by-steps"].target == (0.0, "target 0")


def test_every_view_of_a_metric_has_the_same_axis(usual):
    views = [x for name, x in usual.items() if name.startswith("test-accuracy-by")]
    assert len({figure.axes[0].get_ylim() for figure in views}) == 1 < len(views)


def test_gaps_stay_gaps_and_what_was_never_measured_is_not_drawn():
    report = made_up()._replace(networks=[])
    gaps = [None if i % 3 else 0.5 for i in range(len(report.curves[1].steps))]
    report = replaced(report, "test_accuracy", gaps, 1)
    report = replaced(report, "displacement_cosine", [float("nan")] * 20, 1)
    names = "test-accuracy-by-steps", "displacement-cosine-by-steps"
    accuracy, cosine = (x.axes[0] for x in drawn(report, *names).values())
    (line,) = find_lines(accuracy, "bmuf --nesterov")
    y = line[:, 1]
    assert np.array_equal(np.isnan(y), [x is None for x in gaps])
    assert set(y[~np.isnan(y)]) == {50.0}
    assert find_lines(cosine, "bmuf --nesterov") == []


def test_what_a_figure_leaves_out_is_named_below_it():
    report = made_up()
    silent = report.curves[0]._replace(bytes_per_worker=[0.0] * 20)
    unknown = report.curves[1]._replace(bytes_per_worker=None)
    plots = plotted(report._replace(curves=[silent, unknown, *report.curves[2:]]))
    note = plots["test-accuracy-by-bytes"].note
    assert note.endswith("at least at the end: sync_sgd, bmuf --nesterov.")
    assert plots["test-accuracy-by-steps"].note == ""


def traded(*points):
    """A report of an algorithm for each pair of bytes and accuracy: a0, a1, …"""
    report = made_up()
    rows = [
        report.rows[0]._replace(
            label=f"a{i}",
            algo=f"a{i}",
            bytes_per_worker=sent_bytes,
            result=Spread(mean, 0.01, 5),
        )
        for i, (sent_bytes, mean) in enumerate(points)
    ]
    return report._replace(rows=rows, curves=[], tuning=[])


FEW_POINTS = (10.0, 0.7), (20.0, 0.9), (20.0, 0.8), (40.0, 0.85), (80.0, 0.95)
CROWD = [(100.0 + i, 0.9) for i in range(12)]


def test_of_many_points_those_are_named_that_nobody_beats_with_as_few_bytes():
    report = traded(*FEW_POINTS, *CROWD)
    lower_is_better = report.measure._replace(higher_is_better=False)
    for measure, best in (
        (report.measure, ["a0", "a1", "a4"]),
        (lower_is_better, ["a0"]),
    ):
        plot = plotted(report._replace(measure=measure))["test-accuracy-at-the-end"]
        assert len(plot.lines) == 17 and plot.legend == best
    assert plotted(traded(*FEW_POINTS))["test-accuracy-at-the-end"].legend is None


@pytest.mark.parametrize(
    "byte_counts", [(10.0, 10.0, 20.0), (None, None, 20.0), (0.0, 5, 9)]
)
def test_two_amounts_of_bytes_are_no_trade_off(byte_counts):
    assert "test-accuracy-at-the-end" not in plotted(
        traded(*((sent_bytes, 0.9) for sent_bytes in byte_counts))
    )


@given(
    st.floats(1e-6, 1e6),
    st.floats(1.2, 1e6),
    st.booleans(),
    st.sampled_from(["plain", "bytes", "time"]),
)
def test_an_axis_has_two_to_six_ticks_with_different_texts(low, ratio, log, kind):
    ticks = figures.ticks((low, low * ratio), log, kind)
    assert 2 <= len(ticks) <= 6
    assert all(low <= x <= low * ratio for x in ticks.values())


def test_zeros_on_a_logarithmic_axis_are_drawn_without_a_warning():
    x = np.arange(1.0, 4)
    zero = np.zeros(3)
    lines = [figures.Line(name, "", x, y, y, y) for name, y in (("a", zero), ("b", x))]
    plot = figures.Plot("p", "more", "p", lines, "step", log="y", limits=(0.5, 4))
    with figures.style():
        figures.draw(plot, styles({"a": "sync_sgd", "b": "bmuf"}))


# Colours.


def test_an_algorithm_keeps_its_colour_and_no_two_look_alike(usual):
    style = styles({f"algorithm {i}": f"algorithm {i}" for i in range(50)})
    assert len({tuple(x.values()) for x in style.values()}) == 50
    first_styles = list(style.values())[: len(COLOURS)]
    assert len({x["color"] for x in first_styles}) == len(COLOURS)
    colours = [find_colour(label) for label in ALGORITHMS]
    for name, figure in usual.items():
        used = [x.get_color() for x in figure.axes[0].lines if x.get_color() in colours]
        assert list(dict.fromkeys(used)) == [x for x in colours if x in used], name
        assert len(set(used)) >= 3


# Tables.


@pytest.mark.parametrize("label", ["=1+1", "+a", "-a", "@SUM(A1)", "\t=1"])
def test_a_label_is_no_formula_in_csv(label):
    report = made_up(sweep="alpha", labels={"diloco": label})
    rows = [x._replace(point="alpha=-2") for x in report.rows]
    with io.StringIO(pages.csv(report._replace(rows=rows)), newline="") as file:
        csv_rows = list(csv.DictReader(file))
    assert csv_rows[2]["algorithm"] == f"'{label}"
    assert csv_rows[0]["algorithm"] == "sync_sgd"
    assert csv_rows[2]["alpha"] == "-2"  # a number is none either
    for row in csv_rows:
        for cell in row.values():
            assert not cell.startswith(("=", "+", "-", "@")) or float(cell) <= 0


def test_a_study_of_one_seed_and_one_algorithm_by_loss_is_reported():
    report = made_up(tuned=False)
    one_seed = Spread(0.25, None, 1)
    row = report.rows[0]._replace(seeds=1, result=one_seed, loss=one_seed, syncs=None)
    row = row._replace(bytes_per_worker=None, seconds={}, to_target={})
    curve = report.curves[0]._replace(bytes_per_worker=None, seconds={})
    report = report._replace(
        rows=[row._replace(effective_lr=float("nan"))],
        **{"curves": [curve], "networks": [], "measure": LOSS, "target": None},
        **{"paper": None, "remarks": [], "sentences": []},
    )
    assert {"0.2500", "not counted", "not found"} <= {*make_page(report).words}
    names = plotted(report)
    assert {"test-loss-by-steps", "test-accuracy-by-steps"} <= {*names}
    assert not any("bytes" in name or "time" in name for name in names)


def test_an_algorithm_of_which_all_runs_diverged_is_shown_as_that():
    report = made_up()._replace(networks=[])
    diverged_row = report.rows[1]._replace(
        diverged=5,
        result=None,
        loss=None,
        comparison=Comparison(Kind.NO_COMMON_SEED, clause="all 5 diverged"),
    )
    rows = [report.rows[0], diverged_row, *report.rows[2:]]
    curves = report.curves
    report = report._replace(rows=rows, curves=[curves[0], *curves[2:]])
    assert {"all diverged", "5 seeds, 5 diverged"} <= {*make_page(report).words}
    line = pages.render_markdown(report).splitlines()[7]
    assert line.startswith("| bmuf --nesterov | all diverged | all 5 diverged |")


@pytest.mark.slow
def test_a_study_imports_neither_matplotlib_nor_dask_before_it_needs_them():
    modules = find_imports("from experiments.study import study")
    assert not {"matplotlib", "dask", "distributed"} & modules
