"""Programs of the tests that need devices of their own."""

import functools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from support.commands import ROOT, environment
from support.resumed_runs import OURS


@functools.cache
def run_module(program, *words):
    """Runs a module of support once; returns what it writes to its first argument."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        subprocess.run(
            [sys.executable, "-m", f"support.{program}", str(out), *words],
            # Optimized, as a user's: without it, what is drawn is rounded another way.
            env=environment(PYTHONPATH=OURS, JAX_NUM_CPU_DEVICES=None, XLA_FLAGS=None),
            cwd=ROOT,
            check=True,
            timeout=1200,
        )
        return json.loads(out.read_text())
