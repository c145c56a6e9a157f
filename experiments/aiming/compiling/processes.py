"""Has programs compiled, each by a process of its own."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from experiments.aiming import targets
from experiments.aiming.config import Job
from experiments.cli.exits import printable
from experiments.cli.signals import before_the_end

ROOT = Path(__file__).parents[3]
# Its seconds shall be those of the compiler, not of reading a file.
OWN = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
# Lines of libtpu and of the plug-ins that say nothing of a failure.
NOISE = re.compile("^(WARNING|Failed to find host bounds|E0000|===|learning/)")
MOST = 400  # characters of a process's last words


def answer(
    job: Job, form: dict[str, Any] | None, timeout: float | None
) -> dict[str, Any]:
    """Has a job compiled, and returns what its process answers.

    Args:
        job: what is compiled.
        form: of the task's data, if it is known.
        timeout: seconds; None waits for ever.

    Returns:
        The result of `prepare.compiled`; or {"error"} where it is refused, {"failed"}
        with the last words of a process that has died, {"timeout": seconds}.
    """
    request = {"argv": job.argv, "form": form}
    request |= {"target": job.target.text, "slices": job.target.slices}
    path = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    variables = {**OWN, "PYTHONPATH": os.pathsep.join(path)}
    variables |= targets.environment(job.target)
    # Pipes would have to be read while it runs.
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "experiments.aiming.compiling.child"],
            env={**os.environ, **variables},
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=errors,
            # Ctrl-C in a terminal reaches this process alone, which ends that one.
            start_new_session=True,
            text=True,
        )
        # Not waited for there: a signal comes while this thread waits, with a lock.
        with before_the_end(process.kill):
            code = _ended(process, json.dumps(request), timeout)
        if code is None:
            return {"timeout": timeout}
        texts = [_text(file) for file in (said, errors)]
        return json.loads(texts[0]) if code == 0 else {"failed": _last(code, texts[1])}


def _ended(
    process: "subprocess.Popen[str]", request: str, timeout: float | None
) -> int | None:
    """Gives a process its request; returns its exit code, None if time is over."""
    assert process.stdin is not None
    # It stays open: the process ends when it closes, however this one ends.
    try:
        process.stdin.write(f"{request}\n")
        process.stdin.flush()
    except BrokenPipeError:  # it could not even start: its messages say why
        pass
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None


def _text(file: Any) -> str:
    file.seek(0)
    return file.read()


def _last(code: int, errors: str) -> str:
    """Returns how a process ended, and its last words."""
    lines = [x for x in errors.splitlines() if x.strip() and not NOISE.match(x)]
    words = printable(lines[-1])[:MOST] if lines else "it said nothing"
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"the compiling process ended by {how}: {words}"
