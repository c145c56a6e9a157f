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
from commands import ROOT, TIMEOUT, Run, members

from experiments.checkpoint.resume import FOLDER
from experiments.checkpoint.shards import find_steps, load_workers
from experiments.command import factories
from experiments.command.errors import guarded
from experiments.command.factories import ALGORITHM
from experiments.command.words import as_words
from experiments.one_run import make
from experiments.training.config import parse
from experiments.training.process_group import ALONE, ProcessGroup

# Tasks of ours, for processes too.
OURS = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/support")])


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
    argv, looks = [*shlex.split(command), "--out", str(out)], itertools.count(1)

    def program(stopped):
        def asked():
            if at_look is not None:
                at_look(next(looks))
            return stopped()

        return make(parse(argv), argv, time.perf_counter(), asked, group)

    with redirect_stdout(io.StringIO()) as shown, redirect_stderr(io.StringIO()) as err:
        code = guarded(program)
    return Run(code, shown.getvalue(), err.getvalue(), out)


def refused(command, out):
    """The one line of a run that is refused, and leaves nothing."""
    ended = run(command, out)
    assert (ended.code, ended.stdout) == (2, "") and not out.exists()
    [line] = ended.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def signal_at(look, number=signal.SIGTERM):
    """Sends this process a signal before a dispatch."""

    def at_look(now):
        if now == look:
            os.kill(os.getpid(), number)

    return at_look


def crash_at(look):
    def at_look(now):
        if now == look:
            raise Crash

    return at_look


def flags_of(name, values):
    """An algorithm's flags, where there are values for its parameters."""
    own = factories.describe(ALGORITHM, name).flags
    said = {k: x for k, x in values.items() if k in own and x is not None}
    return " ".join(as_words({"algo": name, **said}))


def lines_of(ended):
    """Lines of metrics.jsonl without their seconds."""
    return [{k: v for k, v in x.items() if k != "seconds"} for x in ended.lines]


def last_part(ended):
    """The last checkpoint."""
    folder = ended.out / FOLDER
    return load_workers(folder, find_steps(folder)[0])


def assert_same_end(actual, expected):
    """Two runs have ended alike, bit for bit."""
    assert (actual.code, expected.code) == (0, 0), actual.stderr + expected.stderr
    for line, other in zip(lines_of(actual), lines_of(expected), strict=True):
        differ = {k: (line[k], other.get(k)) for k in line if line[k] != other.get(k)}
        assert not differ and line.keys() == other.keys(), (line["step"], differ)
    mine, others = last_part(actual), last_part(expected)
    assert (mine.step, mine.workers) == (others.step, others.workers)
    for kind in ("own", "shared"):
        left, right = getattr(mine, kind), getattr(others, kind)
        assert left.keys() == right.keys()
        for name in left:
            assert_same_bits(left[name], right[name], name)
    assert actual.summary["params_sha256"] == expected.summary["params_sha256"]


COMPARED = ("step", "train_loss", "test_loss", "test_accuracy", "divergence")


def assert_near(actual, expected, *more):
    """Two runs have ended alike, but for rounding: sums are added in another order."""
    assert (actual.code, expected.code) == (0, 0), actual.stderr + expected.stderr
    for line, other in zip(actual.lines, expected.lines, strict=True):
        for name in (*COMPARED, *more):
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
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


class Work(NamedTuple):
    """A run of several joined processes.

    Attributes:
        command: its flags.
        out: the folder of its files.
        stop_at: the look at which the last process is asked to stop; 0: none.
    """

    command: str
    out: str
    stop_at: int = 0


def joined(processes, works, folder):
    """Makes runs in processes of one device each: of each run, what process 0 saw."""
    folder.joinpath("work.json").write_text(json.dumps(works))
    seconds = TIMEOUT + 20 * len(works)
    members("lasting", processes, folder, seconds, JAX_NUM_CPU_DEVICES=1)
    found = [json.loads((folder / f"{i}.json").read_text()) for i in range(processes)]
    codes = [[code for code, *_ in each] for each in found]
    assert codes == [codes[0]] * processes
    return [
        Run(*seen, Path(work.out)) for seen, work in zip(found[0], works, strict=True)
    ]


def work(process, processes, folder):
    """Makes the runs of FOLDER/work.json in turn, and writes FOLDER/PROCESS.json."""
    group = ProcessGroup(process, processes, hosts=1, sharing=processes)
    seen = []
    for command, out, look in json.loads((folder / "work.json").read_text()):
        asked = look and process == processes - 1
        ended = run(command, Path(out), signal_at(look) if asked else None, group)
        seen.append(ended[:3])
    (folder / f"{process}.json").write_text(json.dumps(seen))
