"""Has programs compiled, each in a separate process."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from experiments.aiming import targets
from experiments.aiming.config import Job
from experiments.cli.stopping import before_the_end, printable

ROOT = Path(__file__).parents[3]
# Lines of libtpu and of plug-ins that do not explain a failure.
NOISE = re.compile("^(WARNING|Failed to find host bounds|E0000|===|learning/)")
MOST = 400  # characters of a process's last words


def answer(job: Job, timeout: float | None) -> dict[str, Any]:
    """Has a job compiled, and returns the answer of its process.

    Args:
        job: the program to compile.
        timeout: seconds to wait; None waits forever.

    Returns:
        The result of `prepare.compiled`; or {"error"} if the job is refused, {"failed"}
        with the last line of output if the process died, {"timeout": seconds}.
    """
    target, slices = job.target.text, job.target.slices
    request = {"argv": job.argv, "target": target, "slices": slices}
    path = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    variables = targets.environment(job.target) | {
        # The time must be that of the compiler, not of reading a cached file.
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "PYTHONPATH": os.pathsep.join(path),
    }
    module = "experiments.aiming.compiling.child"
    process = subprocess.Popen(
        [sys.executable, "-m", module, json.dumps(request)],
        env={**os.environ, **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Ctrl-C in a terminal reaches only this process, which ends the other.
        start_new_session=True,
        text=True,
    )
    # Its stdin stays open: the process ends when it closes, however this one ends.
    alive, process.stdin = process.stdin, None
    assert alive is not None
    # The handler only kills: this thread may hold a lock while it waits.
    with process, alive, before_the_end(process.kill):
        try:
            text, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            return {"timeout": timeout}
    if process.returncode == 0:
        return json.loads(text)
    lines = [x for x in errors.splitlines() if x.strip() and not NOISE.match(x)]
    words = printable(lines[-1])[:MOST] if lines else "it printed nothing"
    code = process.returncode
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return {"failed": f"the compiling process ended with {how}: {words}"}
