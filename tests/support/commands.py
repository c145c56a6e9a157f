"""Runs of the command line as real processes, for the tests."""

import json
import os
import pty
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import traceback
from contextlib import contextmanager
from fnmatch import fnmatch
from itertools import chain
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PROGRAM = [sys.executable, "-m", "experiments.run"]
COMPARE = [sys.executable, "-m", "experiments.compare"]
CACHE = "JAX_ENABLE_COMPILATION_CACHE"
PROGRAMS = ROOT / ".pytest_cache" / "d" / "programs"
SHARED = {  # what all processes of the tests compile, they keep for each other
    CACHE: "true",
    "JAX_COMPILATION_CACHE_DIR": str(PROGRAMS),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}
# What compiles for other machines looks for its own devices, as a user's process does.
OTHER_MACHINES = dict.fromkeys(("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS"))
TIMEOUT = 120  # seconds, of a process that takes five

# Two periods of the default algorithm, which is bmuf on 8 workers.
BASE = "--steps 32 --eval-every 16"
PARAMS_BYTES = 4 * (64 * 128 + 128 + 128 * 128 + 128 + 128 * 10 + 10)

LINE = {"train_loss", "test_loss", "test_accuracy", "bytes_per_worker", "seconds"}
SUMMARY = LINE | {"algo", "task", "seed", "workers", "steps", "syncs", "params_sha256"}
SUMMARY |= {"total_seconds", "diverged", "diverged_at"}


class EndedRun(NamedTuple):
    """A command that has ended."""

    code: int
    stdout: str
    stderr: str
    out: Path

    def with_code(self, code):
        """The command itself, which must have ended with this exit code."""
        assert self.code == code, self.stderr
        return self

    @property
    def config(self):
        return load((self.out / "config.json").read_text())

    @property
    def lines(self):
        return [load(x) for x in (self.out / "metrics.jsonl").read_text().splitlines()]

    @property
    def summary(self):
        return load((self.out / "summary.json").read_text())


def load(text):
    """JSON as its standard has it: no NaN, no Infinity."""

    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def environment(**changes):
    """The user's, but with two CPU devices, the tests' programs, and no more for jax.

    None takes a variable out: without XLA_FLAGS a process compiles as a user's does.
    """
    inherited = {
        k: v for k, v in os.environ.items() if not k.startswith(("JAX", "XLA"))
    }
    fixed = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "COLUMNS": "1000"}
    flags = {"XLA_FLAGS": os.environ.get("XLA_FLAGS")}
    variables = {**inherited, **fixed, **flags, **SHARED, **changes}
    return {k: str(v) for k, v in variables.items() if v is not None}


def until(condition, description, limit=TIMEOUT):
    """Waits for a condition, and returns what it gave."""
    deadline = time.monotonic() + limit
    result = condition()
    while not result:
        assert time.monotonic() < deadline, f"{description} in {limit} s"
        time.sleep(0.005)
        result = condition()
    return result


def beneath(folder, pattern):
    """The paths of such names beneath a folder that another process may be changing.

    `Path.rglob` raises where a folder goes between its being listed and its being read.
    """
    paths = []
    for parent, folders, files in os.walk(folder):
        names = [name for name in chain(folders, files) if fnmatch(name, pattern)]
        paths += [Path(parent, name) for name in names]
    return paths


def free_address():
    """An address where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return f"127.0.0.1:{sock.getsockname()[1]}"


class EndedCommand:
    """A command that runs; its output goes to files."""

    def __init__(self, words, folder, number, environ, cwd=ROOT):
        self.out, self.err = (folder / f"{x}-{number}" for x in ("out", "err"))
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                words,
                cwd=cwd,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self.pid = self.process.pid

    @property
    def stderr_text(self):
        """The stderr so far."""
        return self.err.read_text("utf-8")

    def wait_for(self, pattern, limit=TIMEOUT):
        """Waits for a text on stderr; returns the match."""
        try:
            return until(lambda: re.search(pattern, self.stderr_text), pattern, limit)
        except AssertionError as error:
            raise AssertionError(f"{error}; said so far:\n{self.stderr_text}") from None

    def kill(self, number=signal.SIGKILL):
        """Sends a signal to the command itself, which must be there."""
        assert self.process.poll() is None
        os.kill(self.pid, number)


def together(commands, cwd=ROOT, timeout=TIMEOUT):
    """Runs programs at the same time: (code, stdout, stderr) of each.

    Args:
        commands: the argv of each, and its variables.
        cwd: the folder in which they run.
        timeout: seconds.
    """
    started = [
        subprocess.Popen(
            words,
            cwd=cwd,
            env=environment(**environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
        )
        for words, environ in commands
    ]
    try:
        outputs = [process.communicate(timeout=timeout) for process in started]
    finally:
        for process in started:
            process.kill()
    return [(x.returncode, *texts) for x, texts in zip(started, outputs, strict=True)]


def members(module, processes, folder, seconds, by_jax=True, killed=(), **environ):
    """Has processes call the function `work` of a module of support.

    jax.distributed connects them, unless `by_jax` is false. Those whose numbers are in
    `killed` must kill themselves.
    All must end with 0; their output goes to FOLDER/NUMBER.txt.
    """
    module = f"support.{module}"
    program = f"import {module}; from support import commands; "
    program += f"commands.take_part({module}.work)"
    words = [sys.executable, "-W", "error", "-c", program]
    environ = environment(
        JAX_CPU_COLLECTIVES_IMPLEMENTATION="gloo",
        PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        **environ,
    )
    outputs = [folder / f"{i}.txt" for i in range(processes)]
    started = []
    deadline = time.monotonic() + seconds
    address = free_address()
    try:
        for i, path in enumerate(outputs):
            arguments = map(str, (i, processes, address if by_jax else "", folder))
            with path.open("wb") as out:
                process = subprocess.Popen(
                    [*words, *arguments],
                    cwd=ROOT,
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                )
            started.append(process)
        codes = [None]
        while None in codes:
            time.sleep(0.05)
            codes = [process.poll() for process in started]
            if any(
                x for i, x in enumerate(codes) if i not in killed
            ):  # those that wait for the one that failed fail in turn
                deadline = min(deadline, time.monotonic() + 10)
            if time.monotonic() > deadline:
                break
    finally:
        for process in started:
            process.kill()
            process.wait()
    log = "\n".join(f"{path.name}: {path.read_text()}" for path in outputs)
    expected = [-signal.SIGKILL if i in killed else 0 for i in range(processes)]
    assert codes == expected, f"ended with {codes}\n{log}"


def take_part(work):
    """Calls work(process, processes, folder) among the processes of `members`.

    Ends by os._exit after an error: jax's shutdown waits for the other processes.
    """
    import jax

    process, processes = map(int, sys.argv[1:3])
    is_connected = processes > 1 and sys.argv[3] != ""
    try:
        if is_connected:
            jax.distributed.initialize(sys.argv[3], processes, process)
        work(process, processes, Path(sys.argv[4]))
        if is_connected:
            jax.distributed.shutdown()
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def run_program(
    words, cwd=ROOT, timeout: float | None = TIMEOUT, stdin_text="", **environ
):
    """A program that has ended, with its output as text; it was told some input."""
    return subprocess.run(
        words,
        cwd=cwd,
        env=environment(**environ),
        input=stdin_text,
        capture_output=True,
        encoding="utf-8",
        timeout=timeout,
    )


def run_python(words, *arguments, **environ):
    """Returns stdout and stderr of Python, run by `run_program`; it must end with 0."""
    ended = run_program(
        [sys.executable, *words], *arguments, **{"PYTHONPATH": ROOT, **environ}
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout, ended.stderr


def find_imports(code):
    """Names of the modules that a fresh process has after some code."""
    names, _ = run_python(["-c", f"{code}\nimport sys\nprint(*sys.modules)"])
    return set(names.split())


def execute(command, out, program=PROGRAM, timeout=TIMEOUT, **environ):
    """Runs a command to its end."""
    words = [*program, *shlex.split(command), "--out", str(out)]
    ended = run_program(words, timeout=timeout, **environ)
    return EndedRun(ended.returncode, ended.stdout, ended.stderr, out)


@contextmanager
def in_background(command, out, module="experiments.run", **environ):
    """Yields a process and, of the text on its stderr, wait_for(text, after="")."""
    words = [sys.executable, "-m", module, *shlex.split(command), "--out", str(out)]
    started = EndedCommand(words, out.parent, "background", environment(**environ))

    def wait_for(text, earlier_text=""):
        pattern = f"{re.escape(earlier_text)}.*{re.escape(text)}"
        ended = started.process.poll
        until(
            lambda: (
                ended() is not None or re.search(pattern, started.stderr_text, re.S)
            ),
            text,
        )
        assert ended() is None, started.stderr_text

    try:
        yield started.process, wait_for
    finally:
        started.process.kill()
        started.process.wait()


@contextmanager
def on_a_terminal(command, out, **environ):
    """Yields a run on a terminal, and the end at which its screen is read."""
    screen, end = pty.openpty()
    process = subprocess.Popen(
        [*PROGRAM, *shlex.split(command), "--out", str(out)],
        cwd=ROOT,
        env=environment(TERM="xterm", COLUMNS=100, **environ),
        stdin=end,
        stdout=end,
        stderr=end,
        start_new_session=True,
    )
    os.close(end)
    try:
        yield process, screen
    finally:
        process.kill()
        process.wait()
