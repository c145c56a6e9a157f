"""Makes the Python environment of the peers of `benchmarks.peers`, or completes it."""

import subprocess
import venv
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

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


class Output(NamedTuple):
    """The output of a command, or "" and the reason of its failure."""

    text: str
    reason: str


class PeerSetups(NamedTuple):
    """Peers after an installation.

    Attributes:
        versions: the versions of those that are installed, by peer.
        reasons: why each other one cannot be installed, by peer.
    """

    versions: dict[str, str]
    reasons: dict[str, str]


def prepare(
    directory: Path, exogym: str | None = None, peers: Iterable[str] = MODULES
) -> PeerSetups:
    """Makes the environment if there is none, and installs the missing peers.

    Args:
        directory: folder of the environment.
        exogym: source from which pip installs EXO Gym; None means GitHub.
        peers: the peers to install.
    """
    python = directory / "bin" / "python"
    if not python.exists():
        venv.create(directory, with_pip=True)
    # pip cannot ask for any CPU-only build above a version, so one version is pinned.
    # Other builds bring gigabytes of CUDA, and are used only if that one is missing.
    cpu_only = ["torch==2.13.0+cpu", "numpy>=2", "--extra-index-url", CPU_WHEELS]
    # Those that EXO Gym imports, of its 15 requirements.
    exogym_requirements = ["tqdm>=4.60", "einops>=0.6", "psutil>=5.8"]
    alternatives = {
        "torch": [[cpu_only], [["torch>=2.9", "numpy>=2"]]],
        "exogym": [[["--no-deps", exogym or EXOGYM], exogym_requirements]],
        "torchft": [[["torchft>=0.2"]]],
    }
    versions = {}
    reasons = {}
    for peer in peers:
        version, reason = require(python, peer, alternatives[peer])
        if version:
            versions[peer] = version
            continue
        reasons[peer] = reason
        if peer == "torch":  # the others cannot run without it
            break
    return PeerSetups(versions, reasons)


def require(python: Path, peer: str, alternatives: list[list[list[str]]]) -> Output:
    """Returns a peer's version, after installing it if needed; or "" and the reason."""
    version_command = [str(python), "-c", VERSION, peer, MODULES[peer]]
    output = run_command(version_command)
    for installs in alternatives:
        if output.text:
            break
        reason = install(python, installs)
        output = Output("", reason) if reason else run_command(version_command)
    return output


def install(python: Path, installs: list[list[str]]) -> str:
    """Runs pip with each list of arguments; returns the first error, or ""."""
    for arguments in installs:
        pip = [str(python), "-m", "pip", "install", "-q", "--retries", "1"]
        _, reason = run_command([*pip, *arguments])
        if reason:
            return reason
    return ""


def run_command(command: list[str]) -> Output:
    """Returns a command's output; if it fails, "" and the last line of its errors."""
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=900)
    except subprocess.TimeoutExpired:
        return Output("", f"{' '.join(command[:4])} took more than 900 s")
    if process.returncode == 0:
        return Output(process.stdout.strip(), "")
    lines = [line for line in process.stderr.splitlines() if line.strip()]
    if lines:
        return Output("", lines[-1].strip())
    return Output("", f"exit code {process.returncode}")
