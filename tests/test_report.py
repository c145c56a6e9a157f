"""A study's report: its page, its figures, its tables and its event files."""

import csv
import errno
import io
import re
import struct
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from reports import ALGORITHMS, NETWORKS, made_up

from experiments import records
from experiments.study import events, tables, write
from experiments.study.results import LOSS, Band, Report
from experiments.study.statistics import Spread

ROOT = Path(__file__).parents[1]
SVG = "{http://www.w3.org/2000/svg}"
VOID = {"meta", "link", "br", "img", "hr"}
NASTY = "<script>alert(\"1\")</script> & 'x' | $y_$"


@pytest.fixture(scope="module", autouse=True)
def small_pictures():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write, "DPI", 20)  # PNG takes most of the time
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("report")
    write.write(made_up(), out)
    return out


class Page(HTMLParser):
    """A page's tags, attributes and text; fails where tags do not match."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.words = [], [], []
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

    def named(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]


def drawn(report: Report):
    from experiments.study import figures

    return figures.draw(report)


def replaced(report, key, values):
    """The report whose second curve has other means, and no bands, for a metric."""
    curve = report.curves[1]
    bands = {**curve.bands, key: Band(values, values, values)}
    curves = list(report.curves)
    curves[1] = curve._replace(bands=bands)
    return report._replace(curves=curves)


def test_a_report_is_a_page_two_tables_and_each_figure_twice(folder):
    names = {str(path.relative_to(folder)) for path in folder.rglob("*.*")}
    figures = {name for name in names if name.startswith("figures/")}
    assert names - figures == {"report.html", "table.md", "table.csv"}
    stems = Counter(name.rpartition(".")[0] for name in figures)
    assert set(stems.values()) == {2}
    assert {"differences", "tuning-lr", "test-accuracy-by-steps"} <= {
        stem.removeprefix("figures/") for stem in stems
    }
    # steps, bytes and three networks
    assert sum("test-accuracy" in stem for stem in stems) == 5
    page = Page((folder / "report.html").read_text())
    assert len(page.named("svg")) == len(stems)


def test_the_page_asks_for_no_other_file(folder):
    text = (folder / "report.html").read_text()
    page = Page(text)
    assert not page.named("script") and not page.named("img")
    for _, attrs in page.tags:
        for key in ("src", "href", "xlink:href", "data", "action"):
            assert attrs.get(key, "#").startswith(("#", "data:,"))
    assert not re.search(r"url\((?!#)|@import", text)
    policy = page.named("meta")[2]
    assert policy["http-equiv"] == "Content-Security-Policy"
    assert policy["content"].startswith("default-src 'none'")


def test_the_page_answers_before_it_explains(folder):
    text = (folder / "report.html").read_text()
    report = made_up()
    places = ["<h1>", 'class="headline"', "<table", 'id="words"', 'id="remarks"']
    places += ['id="figures-measure"', 'id="tuning"', 'id="paper"', 'id="details"']
    places += ['id="commands"']
    assert [text.index(place) for place in places] == sorted(map(text.index, places))
    words = " ".join("".join(Page(text).words).split())
    for told in (report.headline, *report.sentences, *report.remarks, report.command):
        assert told in words


def test_ids_are_unique_in_the_page_and_references_find_them(folder):
    text = (folder / "report.html").read_text()
    page = Page(text)
    ids = Counter(attrs["id"] for _, attrs in page.tags if "id" in attrs)
    assert set(ids.values()) == {1}
    referred = set(re.findall(r"url\(#([^)]+)\)", text))
    for _, attrs in page.tags:
        referred |= set(attrs.get("aria-labelledby", "").split())
        referred.add(attrs.get("xlink:href", "#words")[1:])
    assert referred <= set(ids)
    assert len(referred) > len(page.named("svg"))


def test_a_figure_tells_in_words_what_it_shows(folder):
    for path in sorted(folder.glob("figures/*.svg")):
        root = ElementTree.fromstring(path.read_text())
        title, desc = root.findtext(f"{SVG}title"), root.findtext(f"{SVG}desc")
        assert root.get("role") == "img"
        assert title and desc and len(desc) > len(title)
        assert sum(name in desc for name in ALGORITHMS) >= 3
    root = ElementTree.fromstring((folder / "figures/differences.svg").read_text())
    assert "no difference seen [-0.1, 0.5]" in str(root.findtext(f"{SVG}desc"))


def test_text_in_the_page_is_text_in_its_colours_and_at_least_ten_pixels(folder):
    page = Page((folder / "report.html").read_text())
    drawn = " ".join(
        attrs["style"]
        for tag, attrs in page.tags
        if tag in ("text", "path", "use", "g") and "style" in attrs
    )
    assert not re.search(r"#[0-9a-f]{6}", drawn)
    assert "font-family" not in drawn
    widths = [float(attrs["viewbox"].split()[2]) for attrs in page.named("svg")]
    narrowest = 360 - 2 * 16  # a phone without the margins
    sizes = [float(x) for x in re.findall(r"font-size: ([\d.]+)px", drawn)]
    assert min(sizes) * narrowest / max(widths) >= 10
    assert {"sync_sgd", "local steps", "bytes sent by each worker (log)"} <= set(
        page.words
    )


def test_the_same_study_gives_the_same_bytes(folder, tmp_path):
    write.write(made_up(), tmp_path)
    for path in folder.rglob("*.*"):
        assert (
            path.read_bytes() == (tmp_path / path.relative_to(folder)).read_bytes()
        ), path


def test_labels_cannot_become_tags(tmp_path):
    labels = {"diloco": NASTY, "sync_sgd": 'a" onload="x'}
    write.write(made_up(labels=labels), tmp_path)
    page = Page((tmp_path / "report.html").read_text())
    assert not page.named("script")
    assert not any(key.startswith("on") for _, x in page.tags for key in x)
    assert NASTY in page.words  # in a legend
    table = (tmp_path / "table.md").read_text()
    assert "<script" not in table
    rows = [x for x in table.splitlines() if x.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1


def test_a_sweep_has_a_panel_and_a_group_of_rows_for_each_value(tmp_path):
    report = made_up(sweep="workers")._replace(networks=NETWORKS[:1])
    figures = drawn(report)
    assert list(figures)[:2] == ["differences", "test-accuracy-by-workers"]
    assert len(figures["test-accuracy-by-bytes"].figure.axes) == 3
    (axes,) = figures["test-accuracy-by-workers"].figure.axes
    assert [x.get_text() for x in axes.get_xticklabels()] == ["2", "4", "8"]
    write.write(report, tmp_path)
    page = Page((tmp_path / "report.html").read_text())
    groups = [x for x in page.named("th") if x.get("scope") == "rowgroup"]
    assert len(groups) == 3
    with (tmp_path / "table.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["workers"] for row in rows] == ["2"] * 4 + ["4"] * 4 + ["8"] * 4


def test_what_is_not_swept_is_drawn_beside_every_value():
    report = made_up(sweep="period", tuned=False)._replace(networks=[])
    rows = [x for x in report.rows if x.label != "sync_sgd"]
    curves = [x for x in report.curves if x.label != "sync_sgd"]
    report = report._replace(
        rows=[report.rows[0]._replace(point=""), *rows],
        curves=[report.curves[0]._replace(point=""), *curves],
    )
    figures = drawn(report)
    panels = figures["test-accuracy-by-steps"].figure.axes
    blue = [[x for x in axes.lines if x.get_color() == "#0067b1"] for axes in panels]
    assert [len(lines) for lines in blue] == [1, 1, 1]
    (axes,) = figures["test-accuracy-by-period"].figure.axes
    assert [x.get_text() for x in axes.get_xticklabels()] == ["2", "4", "8"]
    across = [x for x in axes.lines if x.get_color() == "#0067b1"]
    heights = np.concatenate([np.asarray(x.get_ydata(), float) for x in across])
    assert heights == pytest.approx([97.24, 97.24])


def test_too_few_seeds_for_an_interval_are_drawn_thinner_and_said():
    report = made_up()
    rows = [
        x._replace(difference=x.difference and x.difference._replace(low=None))
        for x in report.rows
    ]
    few, enough = drawn(report._replace(rows=rows)), drawn(report)
    assert "too few seeds for an interval" in few["differences"].note
    assert enough["differences"].note == ""
    widths = [
        max(x.get_linewidth() for x in each["differences"].figure.axes[0].lines[1::2])
        for each in (few, enough)
    ]
    assert widths[0] < widths[1]


def test_replicas_that_agree_throughout_are_said_to():
    report = made_up()
    zero = Band([0.0] * 20, [0.0] * 20, [0.0] * 20)
    curves = [x._replace(bands={**x.bands, "divergence": zero}) for x in report.curves]
    note = drawn(report._replace(curves=curves))["divergence-by-steps"].note
    assert note == "0 at every evaluation."


def test_a_run_that_diverges_leaves_the_axes_as_they_were():
    report = made_up()
    steps = np.arange(len(report.curves[1].steps))
    wild = [*(2.0 * 10.0 ** steps[:-2]), float("inf"), float("nan")]
    before, after = drawn(report), drawn(replaced(report, "test_loss", wild))
    for name in ("test-loss-by-steps", "test-loss-by-time-10-gbe"):
        top = before[name].figure.axes[0].get_ylim()[1]
        assert after[name].figure.axes[0].get_ylim()[1] < 2 * top
        assert "bmuf --nesterov: leaves the picture at the top" in after[name].note
        assert before[name].note == ""


def test_every_view_of_a_metric_has_the_same_axis():
    limits = {
        drawing.figure.axes[0].get_ylim()
        for name, drawing in drawn(made_up()).items()
        if name.startswith("test-accuracy-by")
    }
    assert len(limits) == 1


def test_gaps_stay_gaps_and_what_was_never_measured_is_not_drawn():
    report = made_up()
    count = len(report.curves[1].steps)
    gaps = [None if i % 3 else 0.5 for i in range(count)]
    (line,) = (
        x
        for x in drawn(replaced(report, "test_accuracy", gaps))[
            "test-accuracy-by-steps"
        ]
        .figure.axes[0]
        .lines
        if x.get_color() == "#c43c00"
    )
    y = np.asarray(line.get_ydata(), float)
    assert np.array_equal(np.isnan(y), [x is None for x in gaps])
    assert set(y[~np.isnan(y)]) == {50.0}
    nothing = [float("nan")] * count
    figure = drawn(replaced(report, "displacement_cosine", nothing))
    axes = figure["displacement-cosine-by-steps"].figure.axes[0]
    assert "#c43c00" not in {x.get_color() for x in axes.lines}


def test_who_sends_nothing_is_named_below_a_logarithmic_axis():
    report = made_up()
    silent = report.curves[0]._replace(bytes_per_worker=[0.0] * 20)
    unknown = report.curves[1]._replace(bytes_per_worker=None)
    report = report._replace(curves=[silent, unknown, *report.curves[2:]])
    note = drawn(report)["test-accuracy-by-bytes"].note
    assert "sync_sgd: bytes sent by each worker: 0, so not on this axis" in note
    assert "bmuf --nesterov: bytes sent by each worker: not known" in note


def test_an_algorithm_keeps_its_colour_and_no_two_look_alike():
    from experiments.study.canvas import looks

    look = looks([f"algorithm {i}" for i in range(50)])
    assert len(set(look.values())) == 50
    assert len({x.colour for x in list(look.values())[:8]}) == 8
    colours = [x.colour for x in looks(list(ALGORITHMS)).values()]
    for name, drawing in drawn(made_up()).items():
        lines = drawing.figure.axes[0].lines
        used = [x.get_color() for x in lines if x.get_color() in colours]
        assert list(dict.fromkeys(used)) == [x for x in colours if x in used], name
        assert len(set(used)) >= 3


def luminance(colour):
    """Relative, as WCAG 2 defines it."""
    parts = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return linear @ [0.2126, 0.7152, 0.0722]


def contrast(a, b):
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_stand_out_from_the_page(scheme):
    css = (ROOT / "experiments/study/report.css").read_text()
    blocks = re.findall(r":root \{(.*?)\}", css, re.S)
    colours = dict(re.findall(r"--([\w-]+): (#\w{6})", blocks[scheme == "dark"]))
    for name in ("ink", "muted", "link", "good", "bad"):
        assert contrast(colours[name], colours["paper"]) >= 4.5, name
    for paper in ("raised", "warn"):
        assert contrast(colours["ink"], colours[paper]) >= 4.5
    assert contrast(colours["muted"], colours["raised"]) >= 4.5
    for i in range(8):
        assert contrast(colours[f"series-{i}"], colours["paper"]) >= 3, i
    if scheme == "light":
        from experiments.study.canvas import COLOURS

        assert [colours[f"series-{i}"] for i in range(8)] == list(COLOURS)


def test_csv_has_each_figure_as_it_was_computed(folder):
    with (folder / "table.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row, told in zip(rows, made_up().rows, strict=True):
        assert row["algorithm"] == told.label
        measured = (float(row[f"test_accuracy_{x}"]) for x in ("mean", "sd"))
        assert told.measure
        assert tuple(measured) == told.measure[:2]
        assert float(row["bytes_per_worker"]) == told.bytes_per_worker
        assert int(row["diverged"]) == told.diverged
        assert float(row["tuned_lr"]) == told.tuned["lr"]
        for network in NETWORKS:
            seconds = row[f"seconds: {network.name}"]
            assert float(seconds) == told.seconds[network.name]
        ends = [row[f"difference_{end}"] for end in ("mean", "low", "high", "sd")]
        if told.difference is None:
            assert ends == [""] * 4
        else:
            assert list(map(float, ends)) == [
                told.difference.mean,
                told.difference.low,
                told.difference.high,
                told.difference.deviation,
            ]
    assert rows[3]["seconds to target: 10 GbE"] == ""


@pytest.mark.parametrize("label", ["=1+1", "+a", "-a", "@SUM(A1)", "\t=1"])
def test_a_label_is_no_formula_in_csv(label):
    report = made_up(sweep="alpha", labels={"diloco": label})
    rows = [x._replace(point="alpha=-2") for x in report.rows]
    table = tables.csv(report._replace(rows=rows))
    with io.StringIO(table, newline="") as file:
        found = list(csv.DictReader(file))
    assert found[2]["algorithm"] == f"'{label}"
    assert found[0]["algorithm"] == "sync_sgd"
    assert found[2]["alpha"] == "-2"  # a number is none either
    for cell in (x for row in found for x in row.values()):
        assert not cell.startswith(("=", "+", "-", "@")) or float(cell) <= 0


def test_markdown_has_headline_rows_and_remarks(folder):
    text = (folder / "table.md").read_text()
    report = made_up()
    assert report.headline in text
    assert all(f"- {remark}" in text for remark in report.remarks)
    assert "| sync_sgd | 97.24 ± 0.21 % | baseline | 41.4 MB |" in text
    assert "not in 400 steps" in text.splitlines()[-4]


def test_a_study_of_one_seed_and_one_algorithm_by_loss_is_reported(tmp_path):
    report = made_up(tuned=False)
    row = report.rows[0]._replace(
        seeds=1,
        measure=Spread(0.25, None, 1),
        loss=Spread(0.25, None, 1),
        difference=None,
        bytes_per_worker=None,
        syncs=None,
        seconds={},
        to_target={},
        effective_lr=float("nan"),
    )
    curve = report.curves[0]._replace(bytes_per_worker=None, seconds={})
    report = report._replace(
        rows=[row], curves=[curve], networks=[], measure=LOSS, target=None, paper=None
    )
    write.write(report._replace(remarks=[], sentences=[]), tmp_path)
    words = Page((tmp_path / "report.html").read_text()).words
    assert "0.2500" in words and "not counted" in words and "not found" in words
    names = {path.stem for path in tmp_path.glob("figures/*.svg")}
    assert "test-loss-by-steps" in names and "test-accuracy-by-steps" in names
    assert not any("bytes" in name or "time" in name for name in names)


def test_an_algorithm_of_which_all_runs_diverged_is_shown_as_that(tmp_path):
    report = made_up()._replace(networks=NETWORKS[:1])
    gone = report.rows[1]._replace(
        diverged=5, measure=None, loss=None, difference=None, verdict="all 5 diverged"
    )
    curves = [report.curves[0], *report.curves[2:]]
    report = report._replace(
        rows=[report.rows[0], gone, *report.rows[2:]], curves=curves
    )
    write.write(report, tmp_path)
    words = Page((tmp_path / "report.html").read_text()).words
    assert "all diverged" in words and "5 seeds, 5 diverged" in words
    line = (tmp_path / "table.md").read_text().splitlines()[7]
    assert line.startswith("| bmuf --nesterov | all diverged | all 5 diverged |")


def test_a_full_disk_leaves_the_earlier_file_and_no_half_one(tmp_path, monkeypatch):
    path = tmp_path / "table.md"
    records.write(path, b"earlier")

    def fill(self, content):
        with self.open("wb") as file:
            file.write(content[:3])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fill)
    with pytest.raises(OSError, match="No space left"):
        records.write(path, b"later and longer")
    assert [x.name for x in tmp_path.iterdir()] == ["table.md"]
    assert path.read_text() == "earlier"


def test_importing_the_report_does_not_import_matplotlib():
    names = "write, html, tables, events"
    program = f"from experiments.study import {names}; import sys; print(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert not {"matplotlib", "tensorboardX"} & set(run.stdout.split())


def test_what_is_not_installed_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"syncalgos\[tensorboard\]") as caught:
        events.check()
    assert len(str(caught.value).splitlines()) == 1


def framed(path):
    """The messages of a TFRecord file: length, its checksum, data, its checksum."""
    content, at = path.read_bytes(), 0
    while at < len(content):
        (length,) = struct.unpack_from("<Q", content, at)
        yield content[at + 12 : at + 12 + length]
        at += 12 + length + 4


def test_event_files_hold_the_metrics(tmp_path):
    pytest.importorskip("tensorboardX", reason="tensorboardX is not installed")
    from tensorboardX.proto import event_pb2

    lines = [
        {"step": 20, "train_loss": 1.5, "test_accuracy": None, "seconds": 0.5},
        {"step": 40, "train_loss": 0.1, "test_accuracy": 0.875, "seconds": 1.25},
    ]
    runs = [("bmuf/seed-0", lines), ("diloco/seed-1", lines[:1])]
    for _ in range(2):  # a second time takes the place of the first
        events.write_events(tmp_path, runs)
    for name, told in runs:
        (path,) = (tmp_path / name).iterdir()
        found = {}
        for record in framed(path):
            event = event_pb2.Event.FromString(record)  # pyright: ignore
            for value in event.summary.value:
                key = (value.tag, event.step)
                found[key] = (event.wall_time, value.simple_value)
        assert found == {
            (key, line["step"]): (line["seconds"], float(np.float32(x)))
            for line in told
            for key, x in line.items()
            if key != "step" and x is not None
        }


def test_tables_end_no_cell_early():
    report = made_up(labels={"diloco": "a | b\nc"})
    rows = [x for x in tables.markdown(report).splitlines() if x.startswith("|")]
    assert len(rows) == 2 + len(ALGORITHMS)
    assert any(r"| a \| b c |" in row for row in rows)
