"""Programs of the tests that need devices of their own."""

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from commands import ROOT, environment
from lasting import OURS

PATH = os.pathsep.join([OURS, str(ROOT / "tests/engine/meshes")])


@functools.cache
def found(program, *words):
    """Runs a program of tests/ once; returns what it writes into its first argument."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        subprocess.run(
            [sys.executable, f"tests/{program}", str(out), *words],
            # Optimized, as a user's: without it, what is drawn is rounded another way.
            env=environment(PYTHONPATH=PATH, JAX_NUM_CPU_DEVICES=None, XLA_FLAGS=None),
            cwd=ROOT,
            check=True,
            timeout=1200,
        )
        return json.loads(out.read_text())
