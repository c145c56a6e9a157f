"""Output that cannot be shown does not stop a run; what is shown is text."""

import os
import signal
import subprocess
import threading
from contextlib import contextmanager
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.commands import (
    COMPARE,
    PROGRAM,
    ROOT,
    TIMEOUT,
    EndedRun,
    environment,
    on_a_terminal,
)
from support.resumed_runs import OURS, run, untimed_lines
from support.tiers import tiers

from experiments import run as command_line
from experiments.command import stopping, terminal
from experiments.command.errors import BadRequest, run_guarded
from experiments.command.stopping import printable

TINY = (
    "--task support.tiny_tasks:drawing --workers 2 --steps 11 --eval-every 4 --period 4"
)
STUDY = (
    "--task support.tiny_tasks:drawing --workers 2 --steps 11 --algos bmuf --seeds 2"
)


# Streams


@contextmanager
def broken_pipe():
    """The end of a pipe that nobody reads."""
    reader, end = os.pipe()
    os.close(reader)
    yield end
    os.close(end)


@contextmanager
def full():
    """A file on a disk without room."""
    if not os.path.exists("/dev/full"):
        pytest.skip("no disk here is full")
    with open("/dev/full", "wb") as file:
        yield file.fileno()


def started(words, out, program=PROGRAM, shell="exec", **streams):
    """A command that has ended; its stderr or stdout may be broken."""
    ended = subprocess.run(
        ["sh", "-c", f'{shell} "$@"', "sh", *program, *words.split(), "--out", out],
        cwd=ROOT,
        env=environment(PYTHONPATH=OURS, TERM="xterm"),
        **{"stdin": subprocess.DEVNULL, "stdout": -1, "stderr": -1, **streams},
        encoding="utf-8",
        timeout=TIMEOUT,
    )
    return EndedRun(ended.returncode, ended.stdout, ended.stderr, out)


@pytest.fixture(scope="module")
def unbroken_run(tmp_path_factory):
    """The run whose output is read."""
    return run(TINY, tmp_path_factory.mktemp("whole") / "out")


def assert_complete(ended, unbroken_run):
    assert ended.code == 0
    assert untimed_lines(ended) == untimed_lines(unbroken_run)
    assert ended.summary["params_sha256"] == unbroken_run.summary["params_sha256"]


@pytest.mark.parametrize(
    ("broken", "streams", "processes"),
    [
        pytest.param(broken_pipe, {"stdout"}, 1, marks=pytest.mark.slow),
        pytest.param(full, {"stderr"}, 1, marks=pytest.mark.long),
        pytest.param(full, {"stdout", "stderr"}, 2, marks=pytest.mark.long),
    ],
)
def test_broken_output_stops_no_run(broken, streams, processes, unbroken_run, tmp_path):
    words = f"{TINY} --processes {processes}"
    with broken() as end:
        ended = started(words, tmp_path / "out", **dict.fromkeys(streams, end))
    assert_complete(ended, unbroken_run)
    if "stdout" not in streams:  # what is not broken says all
        assert ended.stdout.startswith("bmuf on support.tiny_tasks:drawing: 11 steps")
    if "stderr" not in streams:
        assert ended.stderr.splitlines()[-1].startswith("the results are those of")


@pytest.mark.slow
def test_terminal_that_is_closed_while_it_shows_a_bar_stops_no_run(
    unbroken_run, tmp_path
):
    out = tmp_path / "out"
    screen_text = b""
    with on_a_terminal(TINY, out, PYTHONPATH=OURS) as (process, screen):
        while b"training" not in screen_text:
            screen_text += os.read(screen, 4096)  # fails when the process has ended
        os.close(screen)
        assert_complete(EndedRun(process.wait(TIMEOUT), "", "", out), unbroken_run)


@pytest.mark.parametrize("processes", tiers([1, 2], slow=[1]))
def test_closed_streams_stop_no_run(processes, unbroken_run, tmp_path):
    words = f"{TINY} --processes {processes}"
    ended = started(words, tmp_path / "out", shell="exec <&- >&- 2>&-; exec")
    assert_complete(ended, unbroken_run)


@pytest.mark.slow
def test_broken_output_stops_no_study(tmp_path):
    with broken_pipe() as end:
        ended = started(STUDY, tmp_path / "out", COMPARE, stdout=end, stderr=end)
    assert ended.code == 0
    assert (ended.out / "report.html").exists()


def test_text_that_cannot_be_written_is_dropped():
    with full() as end:
        print("lost", file=stopping.unfailing(end), flush=True)


def test_signal_during_a_print_is_said(capfd, monkeypatch):
    """The stream is in use: print raises a RuntimeError."""
    monkeypatch.setattr(stopping, "say", Mock(side_effect=RuntimeError))
    with pytest.raises(stopping.Terminated):
        stopping.Stop(False).handle(signal.SIGTERM, None)
    assert capfd.readouterr().err == "stopped with nothing to save\n"


def test_code_is_that_of_the_error_which_cannot_be_shown(tmp_path):
    with full() as end:
        ended = started("--algo bmfu", tmp_path / "out", stdout=end, stderr=end)
    assert ended.code == stopping.BAD_REQUEST


# Threads


@pytest.mark.slow
def test_commands_run_in_a_thread(tmp_path, words=TINY):
    codes = []
    argv = [*words.split(), "--out", str(tmp_path / "out")]
    thread = threading.Thread(target=lambda: codes.append(command_line.main(argv)))
    thread.start()
    thread.join(TIMEOUT)
    assert codes == [0]


@pytest.mark.long
def test_processes_are_started_from_a_thread(tmp_path, monkeypatch):
    for name, value in environment(JAX_NUM_CPU_DEVICES=1, PYTHONPATH=OURS).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(ROOT)
    test_commands_run_in_a_thread(tmp_path, f"{TINY} --processes 2")


# Text

SPOILT = {
    "\x1b[31mred\x1b[0m": "red",
    "a\x9b2Jb": "ab",
    "title\x1b]0;owned\x07!": "title!",
    "title\x1b]0;owned\x1b\\!": "title!",
    "kept\x1b]0;to the end": "kept0;to the end",
    "\x1bc\x1b(Breset": "reset",
    "b\x08el\x07\0": "bel",
    "one\r\ntwo\rthree\x85four\u2028five": "one two three four five",
    "a\u202eb\u2066c": "abc",
    "  × ζ 語 é 🙂 ": "  × ζ 語 é 🙂",
    "no sequence\x1b": "no sequence",
}


@pytest.mark.parametrize("text", SPOILT)
def test_controls_are_taken_out_of_text(text):
    assert printable(text) == SPOILT[text]


@pytest.mark.slow
@given(st.text(st.characters(codec="utf-8")))
def test_printable_text_stays_so(text):
    once = printable(text)
    assert printable(once) == once
    assert not any(ord(x) < 32 or 127 <= ord(x) < 160 for x in once)


def test_lines_errors_and_summaries_are_printable(capsys):
    def program(stopped):
        terminal.show("\x1b[2Jhead\n  row\x07")
        with terminal.open_report(3) as report:
            report.line("note\x1b[31m\nprocess 0")
        raise BadRequest("no\x1b]0;x\x07 such\nfile\x9b1m")

    assert run_guarded(program) == stopping.BAD_REQUEST
    output = capsys.readouterr()
    assert output.out == "head\n  row\n"
    assert output.err == "note process 0\nerror: no such file\n"
