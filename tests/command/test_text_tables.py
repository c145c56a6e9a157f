"""Tables and texts fit the terminal, and lose nothing that they do not name."""

import fcntl
import os
import random
import re
import struct
import sys
import termios
from contextlib import contextmanager, suppress

import pytest
from rich.cells import cell_len

from experiments.command import terminal
from experiments.command.text_tables import (
    Columns,
    definitions,
    format_text_table,
    terminal_width,
    wrap_text,
)

WIDTHS = (60, 80, 132)
HEADS = ("algorithm", "test accuracy", "against the-baseline", "most a worker sent")
HEADS += ("lr", "effective lr", "diverged")
WORDS = ("bmuf", "--nesterov", "diloco", "--outer-lr", "0.7", "学習率", "a" * 40)
COLUMNS = Columns(
    text=("algorithm", "against the-baseline"),
    optional=("effective lr", "lr", "diverged", "most a worker sent"),
    elsewhere="all columns are in table.md",
)


@contextmanager
def stdout_on_terminal(monkeypatch, columns):
    """Makes stdout a terminal of so many columns."""
    screen, end = os.openpty()
    size = struct.pack("HHHH", 40, columns, 0, 0)
    fcntl.ioctl(end, termios.TIOCSWINSZ, size)
    with open(end, "w") as stdout, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        patch.setattr(sys, "__stdout__", stdout)
        patch.delenv("COLUMNS", raising=False)
        yield patch
    os.close(screen)


@pytest.mark.parametrize("columns", WIDTHS)
def test_the_width_is_that_of_the_terminal(monkeypatch, columns):
    with stdout_on_terminal(monkeypatch, columns) as patch:
        assert terminal_width() == columns
        patch.setenv("COLUMNS", "71")
        assert terminal_width() == 71


def test_a_pipe_has_no_width_whatever_columns_says(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "60")
    with (tmp_path / "out").open("w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        assert terminal_width() is None


def drawn_rows(rng):
    """Rows whose labels have up to 12 words, one of them of 40 letters."""
    rows = []
    for _ in range(rng.randint(1, 6)):
        label = " ".join(rng.choices(WORDS, k=rng.randint(1, 12)))
        mean = rng.uniform(0, 100)
        clause = f"worse by {mean:.2f} points [{-mean:.3f}, {mean:.4g}], and 1 diverged"
        cells = (label, f"{mean:.2f} ± {mean / 9:.2f} %", clause, f"{mean:.4g} MB")
        cells += (f"{mean:.3g} (edge)", f"{mean:.3g}", "0")
        rows.append(dict(zip(HEADS, cells, strict=True)))
    return rows


@pytest.mark.parametrize("width", (24, *WIDTHS))
@pytest.mark.parametrize("elsewhere", ("", COLUMNS.elsewhere))
def test_a_table_fits_and_has_each_cell_or_names_its_column(width, elsewhere):
    rng = random.Random(width)
    for _ in range(60):
        rows = drawn_rows(rng)
        lines = format_text_table(rows, COLUMNS._replace(elsewhere=elsewhere), width)
        assert max(map(cell_len, lines)) <= width
        text = "\n".join(lines)
        joined = " ".join(lines)
        _, _, note = joined.partition("(no room for: ")
        names = note.partition(";")[0].split(", ") if note else []
        assert tuple(names) == COLUMNS.optional[: len(names)]
        assert bool(names) == bool(elsewhere and elsewhere in joined)
        for row in rows:
            figures = [row[x] for x in HEADS[1:2] + HEADS[3:] if x not in names]
            # Whole, within one line.
            for figure in figures:
                assert any(figure in line for line in lines)
            assert all(word in text for word in row["algorithm"].split()) or width < 60
            interval = row["against the-baseline"].partition("[")[2].partition("]")[0]
            assert any(f"[{interval}]" in line for line in lines) or width < 60


def test_a_wide_terminal_and_a_pipe_have_a_line_for_each_row():
    rows = drawn_rows(random.Random(0))
    full = format_text_table(rows, COLUMNS, None)
    assert len(full) == 1 + len(rows)
    assert format_text_table(rows, COLUMNS, max(map(cell_len, full))) == full
    narrower = format_text_table(rows, COLUMNS, max(map(cell_len, full)) - 1)
    assert len(narrower) > len(full)


def test_headings_wrap_first_then_columns_go_in_their_order():
    row = dict.fromkeys(HEADS, "1") | {"algorithm": "bmuf", HEADS[2]: "baseline"}
    lines = format_text_table([row], COLUMNS, 80)
    assert lines[-1].split() == ["bmuf", "1", "baseline", "1", "1", "1", "1"]
    columns_left = [*HEADS]
    for width in range(80, 24, -1):
        text = " ".join(format_text_table([row], COLUMNS, width))
        if "(no room for: " not in text:
            continue
        names = text.partition("(no room for: ")[2].partition(";")[0].split(", ")
        assert names == [*COLUMNS.optional[: len(names)]]
        columns_left = [x for x in columns_left if x not in names]
    assert columns_left == [*HEADS[:3]]


@pytest.mark.parametrize("width", WIDTHS)
def test_sentences_wrap_at_spaces_and_not_within_a_number_with_its_unit(width):
    words = "it sent 156.7 kB of 6 arrays, 97.24 ± 0.12 % [0.50, 1.10], in 24 µs "
    lines = wrap_text(words * 9, width)
    assert max(map(len, lines)) <= width
    assert " ".join(lines) == (words * 9).rstrip()
    for unbroken in ("156.7 kB", "97.24 ± 0.12 %", "[0.50, 1.10]", "24 µs"):
        assert sum(line.count(unbroken) for line in lines) == 9
    path = f"report: /{'folder/' * 30}report.html"
    assert path.split()[1] in wrap_text(path, width)


def test_definitions_stand_beside_their_names_or_below():
    texts = {"speed": "12 steps/s", "layout": "8 workers on 2 devices, backend gloo"}
    assert definitions(texts, None) == [
        "  speed   12 steps/s",
        "  layout  8 workers on 2 devices, backend gloo",
    ]
    assert definitions(texts, 40) == [
        "  speed   12 steps/s",
        "  layout  8 workers on 2 devices,",
        "          backend gloo",
    ]
    path = "x" * 40
    assert definitions({"speed": "12 steps/s", "files": path}, 40) == [
        "  speed  12 steps/s",
        "  files",
        f"    {path}",
    ]


def drawn_bars(monkeypatch, columns, draw):
    """The lines of a bar's last picture, in a terminal of so many columns."""
    screen, end = os.openpty()
    with open(end, "w") as stderr, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stderr)
        patch.setenv("COLUMNS", str(columns))
        patch.setenv("TERM", "xterm")
        draw()
        stderr.flush()
    pieces = []
    with suppress(OSError):  # nobody writes to it any more, and all is read
        piece = os.read(screen, 1 << 16)  # at most 4 KiB at once
        while piece:
            pieces.append(piece)
            piece = os.read(screen, 1 << 16)
    os.close(screen)
    text = b"".join(pieces).decode()
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).split("\r")


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("label", ["bmuf", "bmuf[--nesterov --period 16], seed 1000"])
def test_bars_fit_and_show_times_and_numbers_in_full(monkeypatch, columns, label):
    def draw():
        with terminal.open_report(1_000_000) as report:
            report.step(123_456, 0.12345)
            report.line(" ".join(["step 16/32  test accuracy 0.9712"] * 9))
        with terminal.bar(terminal.elapsed_time(), "{task.fields[left]}") as bars:
            bars.add_task(label, total=2, left="step 1440/1440  loss 0.1234")
            bars.add_task("runs", total=2, left="about 2.3 min left")

    lines = drawn_bars(monkeypatch, columns, draw)
    assert max(cell_len(line.strip("\n")) for line in lines) <= columns
    assert any(
        re.search(r"123456/1000000 steps loss 0\.1235 0:00:0\d \+ \S+ left", line)
        for line in lines
    )
    runs = [line for line in lines if re.search("0:00:0.*1440/1440  loss 0.1234", line)]
    assert runs and all(line.strip().startswith(label[:8]) for line in runs)
    assert any(re.search(r"0:00:0\d about 2\.3 min left", line) for line in lines)
    assert sum(line.count("accuracy 0.9712") for line in lines) == 9
