"""Runs that are stopped and go on: in this process, and in several that are joined."""

import io
import itertools
import json
import os
import shlex
import signal
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest

from experiments.checkpoint.resume import FOLDER
from experiments.checkpoint.shards import find_steps, load_workers
from experiments.command import factories
from experiments.command.errors import run_guarded
from experiments.command.factories import ALGORITHM
from experiments.command.words import as_words
from experiments.one_run import make_run_of_command
from experiments.training.config import parse
from experiments.training.process_group import ALONE, ProcessGroup
from support.commands import ROOT, TIMEOUT, EndedRun, members

# Tasks of ours, for processes too.
OURS = os.pathsep.join([str(ROOT), str(ROOT / "tests")])


class Crash(Exception):
    """Ends a run with nothing saved, as a bug would."""


def run(command, out, at_look: Callable[[int], None] | None = None, group=ALONE):
    """Makes a run in this process.

    Args:
        command: its flags.
        out: the folder of its files.
        at_look: is called with 1, 2, … before each dispatch.
        group: the processes that make it.
    """
    jax.devices()  # a run that came first would choose how many there are
    argv = [*shlex.split(command), "--out", str(out)]
    looks = itertools.count(1)

    def program(stopped):
        def look():
            if at_look is not None:
                at_look(next(looks))
            return stopped()

        return make_run_of_command(parse(argv), argv, time.perf_counter(), look, group)

    with (
        redirect_stdout(io.StringIO()) as out_text,
        redirect_stderr(io.StringIO()) as err,
    ):
        code = run_guarded(program)
    return EndedRun(code, out_text.getvalue(), err.getvalue(), out)


def refused(command, out):
    """The one line of a run that is refused, and leaves nothing."""
    ended = run(command, out)
    assert (ended.code, ended.stdout) == (2, "") and not out.exists()
    [line] = ended.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def signal_before(look, number=signal.SIGTERM):
    """Sends this process a signal before a dispatch."""

    def at_look(current_look):
        if current_look == look:
            os.kill(os.getpid(), number)

    return at_look


def crash_before(look):
    def at_look(current_look):
        if current_look == look:
            raise Crash

    return at_look


def format_flags(name, values):
    """An algorithm's flags, where there are values for its parameters."""
    algorithm_flags = factories.describe_factory(ALGORITHM, name).flags
    flag_values = {
        k: x for k, x in values.items() if k in algorithm_flags and x is not None
    }
    return " ".join(as_words({"algo": name, **flag_values}))


def untimed_lines(ended):
    """Lines of metrics.jsonl without their seconds."""
    lines = []
    for line in ended.lines:
        lines.append({key: line[key] for key in line if key != "seconds"})
    return lines


def load_newest(ended):
    """The last checkpoint."""
    folder = ended.out / FOLDER
    return load_workers(folder, find_steps(folder)[0])


def assert_same_end(actual, expected):
    """Two runs have ended alike, bit for bit."""
    assert (actual.code, expected.code) == (0, 0), actual.stderr + expected.stderr
    for line, other in zip(untimed_lines(actual), untimed_lines(expected), strict=True):
        differ = {k: (line[k], other.get(k)) for k in line if line[k] != other.get(k)}
        assert not differ and line.keys() == other.keys(), (line["step"], differ)
    actual_part = load_newest(actual)
    expected_part = load_newest(expected)
    assert (actual_part.step, actual_part.workers) == (
        expected_part.step,
        expected_part.workers,
    )
    for kind in ("own", "shared"):
        actual_arrays = getattr(actual_part, kind)
        expected_arrays = getattr(expected_part, kind)
        assert actual_arrays.keys() == expected_arrays.keys()
        for name in actual_arrays:
            assert_same_bits(actual_arrays[name], expected_arrays[name], name)
    assert actual.summary["params_sha256"] == expected.summary["params_sha256"]


COMPARED = ("step", "train_loss", "test_loss", "test_accuracy", "divergence")


def assert_near(actual, expected, *more_names):
    """Two runs have ended alike, but for rounding: sums are added in another order."""
    assert (actual.code, expected.code) == (0, 0), actual.stderr + expected.stderr
    for line, other in zip(actual.lines, expected.lines, strict=True):
        for name in (*COMPARED, *more_names):
            # Of float32 after 11 steps of adam.
            near = pytest.approx(other[name], abs=1e-4)
            assert line[name] == near, (line["step"], name)


def assert_same_bits(x, y, name):
    assert (x.dtype, x.shape) == (y.dtype, y.shape), name
    if x.tobytes() != y.tobytes():  # the message tells how far apart they are
        np.testing.assert_array_equal(x, y, err_msg=name)
        raise AssertionError(f"{name} differs in bits")


def files(folder):
    """All that is in a folder, to the byte."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


class ResumedWork(NamedTuple):
    """A run of several joined processes.

    Attributes:
        command: its flags.
        out: the folder of its files.
        stop_look: the look at which the last process is asked to stop; 0: none.
    """

    command: str
    out: str
    stop_look: int = 0


def joined(processes, works, folder):
    """Makes runs in processes of one device each: of each run, what process 0 saw."""
    folder.joinpath("work.json").write_text(json.dumps(works))
    seconds = TIMEOUT + 20 * len(works)
    members("resumed_runs", processes, folder, seconds, JAX_NUM_CPU_DEVICES=1)
    results = [json.loads((folder / f"{i}.json").read_text()) for i in range(processes)]
    expected_codes = [code for code, *_ in results[0]]
    for process_results in results:
        assert [code for code, *_ in process_results] == expected_codes
    outs = [Path(work.out) for work in works]
    return [EndedRun(*x, out) for x, out in zip(results[0], outs, strict=True)]


def work(process, processes, folder):
    """Makes the runs of FOLDER/work.json in turn, and writes FOLDER/PROCESS.json."""
    group = ProcessGroup(process, processes, hosts=1, sharing=processes)
    results = []
    for command, out, look in json.loads((folder / "work.json").read_text()):
        is_stopping = look and process == processes - 1
        at_look = signal_before(look) if is_stopping else None
        ended = run(command, Path(out), at_look, group)
        results.append(ended[:3])
    (folder / f"{process}.json").write_text(json.dumps(results))
