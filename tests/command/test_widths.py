"""Commands on real terminals of 60, 80 and 132 columns: tables, bars and help fit."""

import fcntl
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios

import pytest
from rich.cells import cell_len
from support.commands import OTHER_MACHINES, ROOT, TIMEOUT, environment

WIDTHS = (60, 80, 132)
AIM = "--target cpu:4 --algos bmuf,diloco --period 5 --step-time 0.01 --network 10gbe"
STUDY = "--algos 'sync_sgd, NBM=bmuf --nesterov' --period 8 --seeds 2 --steps 32"
STUDY += " --eval-every 16 --step-time 0.001"
HELP = ("run --help", "run --help-all", "run --list", "compare --help")
HELP += ("compare --help-all", "aim --help", "run --algo halos --help")


def lines_on_terminal(module, words, columns, **environ):
    """What a command writes on a terminal, line by line, each state of a bar too."""
    screen, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    with subprocess.Popen(
        [sys.executable, "-m", f"experiments.{module}", *shlex.split(words)],
        cwd=ROOT,
        env=environment(TERM="xterm", COLUMNS=None, **environ),
        stdin=end,
        stdout=end,
        stderr=end,
        start_new_session=True,
    ) as process:
        os.close(end)
        chunks = []
        chunk = read(screen)
        while chunk:
            chunks.append(chunk)
            chunk = read(screen)
        assert process.wait(TIMEOUT) == 0, b"".join(chunks).decode()
    os.close(screen)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", b"".join(chunks).decode())
    return re.split(r"\r*\n|\r", text)


def read(screen):
    """The next bytes of a screen; none once the process has ended."""
    try:
        return os.read(screen, 1 << 16)
    except OSError:
        return b""


def assert_fit(lines, columns):
    """All lines fit, but for those with a path, which stays whole to be copied."""
    assert [x for x in lines if cell_len(x) > columns and "/" not in x] == []


@pytest.mark.slow
@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("words", HELP)
def test_help_and_lists_fit(words, columns):
    module, _, flags = words.partition(" ")
    lines = lines_on_terminal(module, flags, columns)
    assert [x for x in lines if cell_len(x) > columns] == []


@pytest.mark.slow
def test_a_comparison_fits_and_says_which_columns_it_leaves_out(tmp_path):
    words = f"{STUDY} --out {tmp_path}"
    for columns in WIDTHS:
        lines = lines_on_terminal("compare", words, columns)
        assert_fit(lines, columns)
        text = "\n".join(lines)
        note = " ".join(text.partition("(no room for: ")[2].split(")")[0].split())
        heading = lines.index("sync_sgd and NBM on digits") + 1
        assert lines[heading].startswith("algorithm")
        for name in ("effective lr", "lr"):
            is_named = name in note.partition(";")[0].split(", ")
            assert is_named != (name.split()[0] in lines[heading].split())
        assert note == "" or note.endswith(f"all columns are in {tmp_path}/table.md")
        for figure in re.findall(r"\d\d\.\d\d ± \d\.\d\d %", text):
            assert any(figure in line for line in lines)
        assert len(re.findall(r"^(?:sync_sgd|NBM) .*\d ± \d.* %", text, re.M)) == 2
        # The widest terminal has room for all columns.
        assert note == "" or columns < 132


@pytest.mark.slow
@pytest.mark.parametrize("columns", WIDTHS)
def test_the_report_of_aim_fits(columns):
    lines = lines_on_terminal("aim", AIM, columns, **OTHER_MACHINES)
    assert_fit(lines, columns)
    assert max(map(cell_len, lines)) <= columns
    text = "\n".join(lines)
    assert ("no room for: collectives across workers" in text) == (columns < 132)
    assert text.count("sync_sgd (for") >= 3
    bars = [x for x in lines if "━" in x and "compiling" in x]
    assert bars and all(re.search(r"\d:\d\d:\d\d *$", x) for x in bars)


@pytest.mark.slow
@pytest.mark.parametrize("columns", WIDTHS)
def test_the_bar_and_the_summary_of_a_run_fit(columns, tmp_path):
    words = f"--steps 64 --eval-every 32 --out {tmp_path}/out"
    lines = lines_on_terminal("run", words, columns)
    assert_fit(lines, columns)
    bars = [x for x in lines if "━" in x]
    times = r"(?:\d:\d\d:\d\d|-:--:--)"
    assert bars and all(re.search(rf"{times} \+ {times} left *$", x) for x in bars)
    assert any(re.match(r"  test accuracy +0\.\d{4}$", x) for x in lines)
