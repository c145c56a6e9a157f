"""Runs of the command line as real processes, for the tests."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PROGRAM = [sys.executable, "-m", "experiments.run"]
CACHE = "JAX_ENABLE_COMPILATION_CACHE"
PROGRAMS = ROOT / ".pytest_cache" / "d" / "programs"
SHARED = {  # what all processes of the tests compile, they keep for each other
    CACHE: "true",
    "JAX_COMPILATION_CACHE_DIR": str(PROGRAMS),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}
TIMEOUT = 120  # seconds, of a process that takes five

# Two periods of the default algorithm, which is bmuf on 8 workers.
BASE = "--steps 32 --eval-every 16"
PARAMS_BYTES = 4 * (64 * 128 + 128 + 128 * 128 + 128 + 128 * 10 + 10)

LINE = {"train_loss", "test_loss", "test_accuracy", "bytes_per_worker", "seconds"}
SUMMARY = LINE | {"algo", "task", "seed", "workers", "steps", "syncs", "params_sha256"}
SUMMARY |= {"total_seconds", "diverged", "diverged_at"}


class Run(NamedTuple):
    """A command that has ended."""

    code: int
    stdout: str
    stderr: str
    out: Path

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

    None takes a variable out.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX", "XLA"))}
    fixed = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "COLUMNS": "1000"}
    changed = {**kept, **fixed, **SHARED, **changes}
    return {k: str(v) for k, v in changed.items() if v is not None}


def printed_by(program, cwd=ROOT, timeout=TIMEOUT, **environ):
    """Runs a program, which must end with 0; returns its stdout and stderr."""
    ended = subprocess.run(
        [sys.executable, program],
        cwd=cwd,
        env=environment(PYTHONPATH=ROOT, **environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=timeout,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout, ended.stderr


def imported_by(code):
    """Names of the modules that a fresh process has after some code."""
    ended = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"],
        cwd=ROOT,
        capture_output=True,
        encoding="utf-8",
        timeout=TIMEOUT,
        check=True,
    )
    return set(ended.stdout.split())


def execute(command, out, program=PROGRAM, timeout=TIMEOUT, **environ):
    ended = subprocess.run(
        [*program, *shlex.split(command), "--out", str(out)],
        cwd=ROOT,
        env=environment(**environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=timeout,
    )
    return Run(ended.returncode, ended.stdout, ended.stderr, out)


@contextmanager
def two_at_a_time(request, folder, **environ):
    """Yields run(command), which makes each run once.

    Those of the parameter `command` of the module's chosen tests are made ahead.
    """
    specs = [getattr(x, "callspec", None) for x in request.session.items]
    modules = [getattr(x, "module", None) for x in request.session.items]
    runs = {}
    with ThreadPoolExecutor(2) as pool:

        def start(command):
            if command not in runs:
                out = folder / str(len(runs)) / "out"
                runs[command] = pool.submit(execute, command, out, **environ)
            return runs[command]

        for spec, module in zip(specs, modules, strict=True):
            if spec and module is request.module and "command" in spec.params:
                start(spec.params["command"])
        yield lambda command: start(command).result()
        pool.shutdown(cancel_futures=True)


@contextmanager
def in_background(command, out, module="experiments.run", **environ):
    """Yields a process and, of the text on its stderr, wait_for(text, after="")."""
    errors = out.with_name("stderr")
    with errors.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *shlex.split(command), "--out", str(out)],
            cwd=ROOT,
            env=environment(**environ),
            stdin=subprocess.DEVNULL,
            stdout=stderr,
            stderr=stderr,
            start_new_session=True,
        )

    def wait_for(text, after=""):
        deadline = time.monotonic() + TIMEOUT
        pattern = re.compile(f"{re.escape(after)}.*{re.escape(text)}", re.DOTALL)
        while not pattern.search(errors.read_text(encoding="utf-8")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)

    try:
        yield process, wait_for
    finally:
        process.kill()
        process.wait()
