"""Measures goodput while processes are killed: `python -m benchmarks.goodput`.

Three processes on this machine train by DiLoCo, either by torchft_members.py of the
examples or by torchft's own class, with the same model, optimizers, period and manager.
Processes are killed with SIGKILL at even distances, and started again at once. Goodput
is the local steps of all processes that a committed sync included, per second. It needs
the extra `torchft`.
"""

# pyright: reportMissingImports=false

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
NAMES = "abc"
KINDS = ("syncalgos", "torchft")
PERIOD = 20
STEP_SECONDS = 0.01  # of each local step, as if the model were larger
SIZES = (64, 256, 1)  # of the layers
BATCH = 16
SYNC_SECONDS = 4.0  # how long a member waits for the others in a sync
HEARTBEAT_MS = 1_500  # after which the lighthouse counts a process as lost
START_SECONDS = 120.0


class Goodput(NamedTuple):
    """A measurement.

    Attributes:
        kind: whose DiLoCo: "syncalgos" or "torchft".
        kills: the number of processes that were killed.
        seconds: the time measured.
        steps: the local steps of all processes that a committed sync included.
        restart_seconds: for each kill, seconds until the killed process was in a
            committed sync again; None if it was not within the time.
    """

    kind: str
    kills: int
    seconds: float
    steps: int
    restart_seconds: list[float | None]


def train_member(kind: str, name: str, lighthouse: str, log_path: Path) -> None:
    """Trains until it is killed, and writes the time of each committed sync."""
    import jax
    import torch

    sys.path[:0] = [str(ROOT / "examples")]
    from torchft_members import join

    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    jax.config.update("jax_platforms", "cpu")
    members = join(name, lighthouse, seconds=SYNC_SECONDS)
    torch.manual_seed(0)  # all members start alike
    inputs, hidden, outputs = SIZES
    model = torch.nn.Sequential(
        torch.nn.Linear(inputs, hidden),
        torch.nn.ReLU(),
        torch.nn.Linear(hidden, outputs),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9)
    if kind == "syncalgos":
        take_step, count_syncs = make_own_step(members, model, optimizer)
    else:
        take_step, count_syncs = make_torchft_step(members.manager, model, optimizer)
    torch.manual_seed(int.from_bytes(os.urandom(4), "big"))  # data of its own
    syncs = count_syncs()
    with log_path.open("a") as log:
        while True:
            x = torch.randn(BATCH, inputs)
            optimizer.zero_grad()
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            take_step()
            time.sleep(STEP_SECONDS)
            if count_syncs() > syncs:
                syncs = count_syncs()
                print(time.time(), file=log, flush=True)


Step = Callable[[], Any]
Count = Callable[[], int]


def make_own_step(members: Any, model: Any, optimizer: Any) -> tuple[Step, Count]:
    """Puts DiLoCo of syncalgos behind the optimizer; its step, and its syncs."""
    from torchft_members import Synced

    import syncalgos

    strategy = syncalgos.diloco(PERIOD, axis=members.peers)
    synced = Synced(model, optimizer, members, strategy)
    return synced.step, lambda: synced.syncs


def make_torchft_step(manager: Any, model: Any, optimizer: Any) -> tuple[Step, Count]:
    """Puts DiLoCo of torchft behind the optimizer; its step, and its syncs."""
    import torch
    from torchft.local_sgd import DiLoCo

    def load_state(saved: dict[str, Any]) -> None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])

    def save_state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    manager.register_state_dict_fn("benchmark", load_state, save_state)
    outer_optimizer = torch.optim.SGD(
        model.parameters(), lr=0.7, momentum=0.9, nesterov=True
    )
    diloco = DiLoCo(
        manager, [model], optimizer, outer_optimizer, PERIOD, pin_memory=False
    )
    diloco.__enter__()
    return optimizer.step, manager.current_step


class GoodputJob:
    """Three members and their lighthouse."""

    def __init__(self, kind: str, folder: Path, python: str) -> None:
        self.kind = kind
        self.folder = folder
        self.python = python
        self.lighthouse_process = subprocess.Popen(
            [python, "-m", "benchmarks.goodput", "--lighthouse"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
        )
        assert self.lighthouse_process.stdout is not None
        self.lighthouse = self.lighthouse_process.stdout.readline().strip()
        self.processes = {name: self.start(name) for name in NAMES}

    def start(self, name: str) -> subprocess.Popen[bytes]:
        """Starts a member."""
        member = [self.kind, name, self.lighthouse, str(self.find_log(name))]
        with (self.folder / f"{name}.errors").open("ab") as errors:
            return subprocess.Popen(
                [self.python, "-m", "benchmarks.goodput", "--member", *member],
                stdout=errors,
                stderr=errors,
                cwd=ROOT,
                env={**os.environ, "RUST_LOG": "error", "OMP_NUM_THREADS": "1"},
            )

    def find_log(self, name: str) -> Path:
        """The file with the times of a member's committed syncs."""
        return self.folder / f"{name}.log"

    def read_times(self, name: str) -> list[float]:
        """The times of a member's committed syncs."""
        path = self.find_log(name)
        lines = path.read_text().split("\n") if path.exists() else [""]
        return [float(line) for line in lines[:-1]]  # the last one may be cut

    def wait_for_syncs(self, count: int) -> None:
        """Waits until each member has taken part in so many syncs."""
        deadline = time.monotonic() + START_SECONDS
        while any(len(self.read_times(name)) < count for name in NAMES):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{self.kind}: not all members synced within {START_SECONDS:g} s: "
                    f"see {self.folder}/*.errors"
                )
            time.sleep(0.1)

    def restart(self, name: str) -> None:
        """Kills a member, and starts it again at once."""
        self.processes[name].kill()
        self.processes[name].wait()
        self.processes[name] = self.start(name)

    def stop(self) -> None:
        """Ends all processes."""
        for process in [*self.processes.values(), self.lighthouse_process]:
            process.kill()
            process.wait()


def measure_goodput(kind: str, kills: int, seconds: float, python: str) -> Goodput:
    """Trains with so many kills, and counts the steps in committed syncs."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        job = GoodputJob(kind, Path(folder), python)
        try:
            job.wait_for_syncs(3)
            begin = time.time()
            kill_times: list[tuple[str, float]] = []
            for number in range(kills):
                time.sleep(max(0, begin + number * seconds / kills + 2 - time.time()))
                name = NAMES[-1 - number % len(NAMES)]
                job.restart(name)
                kill_times.append((name, time.time()))
            time.sleep(max(0, begin + seconds - time.time()))
            times = {name: job.read_times(name) for name in NAMES}
        finally:
            job.stop()
    end = begin + seconds
    syncs = sum(begin < x <= end for name in NAMES for x in times[name])
    restarts = [find_restart(times[name], moment) for name, moment in kill_times]
    return Goodput(kind, kills, seconds, syncs * PERIOD, restarts)


def find_restart(times: Iterable[float], kill_time: float) -> float | None:
    """Seconds from a kill to the process's next committed sync."""
    later = [x for x in times if x > kill_time]
    return round(later[0] - kill_time, 2) if later else None


def make_table(rows: Sequence[Goodput]) -> str:
    """The goodput by kills and kind, the median of the turns, as Markdown."""
    lines = [
        "| kills | syncalgos, steps/s | torchft, steps/s |",
        "|--:|--:|--:|",
    ]
    for kills in sorted({row.kills for row in rows}):
        cells = []
        for kind in KINDS:
            rates = [
                row.steps / row.seconds
                for row in rows
                if row.kind == kind and row.kills == kills
            ]
            cells.append(f"{median(rates):.0f} ({min(rates):.0f}-{max(rates):.0f})")
        lines.append(f"| {kills} | {' | '.join(cells)} |")
    return "\n".join(lines)


def read_rows(path: Path) -> list[Goodput]:
    """Reads stored measurements."""
    lines = path.read_text().splitlines()
    return [Goodput(**json.loads(line)) for line in lines]


def run_lighthouse() -> None:
    """Serves until it is killed, and prints its address."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        "[::]:0",
        min_replicas=2,
        join_timeout_ms=10_000,
        heartbeat_timeout_ms=HEARTBEAT_MS,
    )
    print(f"http://localhost:{server.address().rpartition(':')[2]}", flush=True)
    while True:
        time.sleep(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--member", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--lighthouse", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--kills", type=int, nargs="+", default=[0, 1, 3])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path, help="file to add measurements to")
    parser.add_argument(
        "--python", default=sys.executable, help="interpreter that has torchft"
    )
    arguments = parser.parse_args()
    if arguments.lighthouse:
        run_lighthouse()
    if arguments.member:
        kind, name, lighthouse, log_path = arguments.member
        train_member(kind, name, lighthouse, Path(log_path))
    rows = []
    for turn in range(arguments.turns):
        for kills in arguments.kills:
            # The other one first in every other turn, as a machine's speed drifts.
            for kind in KINDS if turn % 2 == 0 else reversed(KINDS):
                row = measure_goodput(kind, kills, arguments.seconds, arguments.python)
                rows.append(row)
                print(json.dumps(row._asdict()), flush=True)
                if arguments.out:
                    with arguments.out.open("a") as file:
                        print(json.dumps(row._asdict()), file=file)
    print(make_table(rows))


if __name__ == "__main__":
    main()
