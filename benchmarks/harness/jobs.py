"""Times studies by jobs: `python -m benchmarks.harness.jobs`.

It measures the time of one study, made by one process and by `--jobs 2` in turn; each
with an empty compilation cache ("cold"), and with the one that the cold study has
filled ("warm"). It checks that both give the same hashes.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measure import print_record, ratios, summarize_spread

COMPARE = [sys.executable, "-m", "experiments.compare"]
STUDY = ["--algos", "sync_sgd,bmuf,diloco,easgd", "--seeds", "3"]


def study(folder: Path, cache: Path, flags: Sequence[str]) -> float:
    """Makes a study, and returns its seconds.

    Raises:
        RuntimeError: the command failed; the message is its last line.
    """
    environ = {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_ENABLE_COMPILATION_CACHE": "true",
    }
    start = time.perf_counter()
    ended = subprocess.run(
        [*COMPARE, *STUDY, *flags, "--out", str(folder)],
        env=environ,
        capture_output=True,
        text=True,
    )
    if ended.returncode:
        raise RuntimeError(ended.stderr.splitlines()[-1])
    return time.perf_counter() - start


def hashes(folder: Path) -> dict[str, str]:
    """Returns the hashes of a study's runs, by the runs' folders."""
    return {
        str(path.relative_to(folder)): json.loads(path.read_text())["params_sha256"]
        for path in folder.rglob("summary.json")
    }


def measure_study(repeats: int, jobs: int) -> dict[str, list[float]]:
    """Returns the seconds of the study by kind, turn by turn."""
    flags: dict[str, list[str]] = {"serial": [], f"{jobs} jobs": ["--jobs", str(jobs)]}
    seconds: dict[str, list[float]] = {}
    for turn in range(repeats):
        with tempfile.TemporaryDirectory() as root:
            study_hashes = []
            for name in sorted(flags, reverse=bool(turn % 2)):
                for kind in ("cold", "warm"):
                    out = Path(root, f"{name} {kind}")
                    cache = Path(root, f"cache {name}")
                    study_seconds = study(out, cache, flags[name])
                    seconds.setdefault(f"{name}, {kind}", []).append(study_seconds)
                    study_hashes.append(hashes(out))
            if any(other != study_hashes[0] for other in study_hashes):
                raise RuntimeError("the studies have different params")
    return seconds


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    jobs = arguments.jobs
    seconds = measure_study(arguments.repeats, jobs)
    for name, turns in seconds.items():
        print_record(
            {"benchmark": "jobs", "kind": name, "seconds": summarize_spread(turns)}
        )
    for kind in ("cold", "warm"):
        speedup = ratios(seconds[f"{jobs} jobs, {kind}"], seconds[f"serial, {kind}"])
        print_record(
            {"benchmark": "jobs", "kind": kind, "jobs": jobs, "times": speedup}
        )


if __name__ == "__main__":
    main()
