"""Makes the Python environment of the peers of `benchmarks.peers`, or completes it."""

import subprocess
import venv
from collections.abc import Iterable
from pathlib import Path

CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
EXOGYM = (  # on no package index but a test one
    "https://github.com/exo-explore/gym/archive/"
    "9fa323c26364f4437ffd23517da5d65946003963.zip"
)
MODULES = {"torch": "torch", "exogym": "exogym.trainer", "torchft": "torchft"}
VERSION = """
import importlib, sys
from importlib.metadata import version
importlib.import_module(sys.argv[2])
print(version(sys.argv[1]))
"""


def prepare(
    directory: Path, exogym: str | None = None, peers: Iterable[str] = MODULES
) -> tuple[dict[str, str], dict[str, str]]:
    """Makes the environment if there is none, and installs the missing peers.

    Args:
        directory: folder of the environment.
        exogym: source from which pip installs EXO Gym; None means GitHub.
        peers: the peers to install.

    Returns:
        Versions by peer; and, for each peer that cannot be installed, the reason.
    """
    python = directory / "bin" / "python"
    if not python.exists():
        venv.create(directory, with_pip=True)
    # pip cannot ask for any CPU-only build above a version, so one version is pinned.
    # Other builds bring gigabytes of CUDA, and are used only if that one is missing.
    cpu_only = ["torch==2.13.0+cpu", "numpy>=2", "--extra-index-url", CPU_WHEELS]
    few = ["tqdm>=4.60", "einops>=0.6", "psutil>=5.8"]  # that EXO Gym imports, of 15
    ways = {
        "torch": [[cpu_only], [["torch>=2.9", "numpy>=2"]]],
        "exogym": [[["--no-deps", exogym or EXOGYM], few]],
        "torchft": [[["torchft>=0.2"]]],
    }
    found, missing = {}, {}
    for peer, alternatives in [(name, ways[name]) for name in peers]:
        version, reason = installed(python, peer, alternatives)
        if version:
            found[peer] = version
            continue
        missing[peer] = reason
        if peer == "torch":  # the others cannot run without it
            break
    return found, missing


def installed(
    python: Path, peer: str, alternatives: list[list[list[str]]]
) -> tuple[str, str]:
    """Returns a peer's version, after installing it if needed; or "" and the reason."""
    look = [str(python), "-c", VERSION, peer, MODULES[peer]]
    version, reason = run(look)
    for installs in alternatives:
        if version:
            break
        reason = install(python, installs)
        if not reason:
            version, reason = run(look)
    return version, reason


def install(python: Path, installs: list[list[str]]) -> str:
    """Runs pip with each list of arguments; returns the first error, or ""."""
    for arguments in installs:
        pip = [str(python), "-m", "pip", "install", "-q", "--retries", "1"]
        _, reason = run([*pip, *arguments])
        if reason:
            return reason
    return ""


def run(command: list[str]) -> tuple[str, str]:
    """Returns a command's output; if it fails, "" and the last line of its errors."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    except subprocess.TimeoutExpired:
        return "", f"{' '.join(command[:4])} took more than 900 s"
    if done.returncode == 0:
        return done.stdout.strip(), ""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return "", lines[-1].strip() if lines else f"exit code {done.returncode}"
