"""Processes that come and go, by torchft: examples/torchft_members.py."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.commands import run_python

import syncalgos

ROOT = Path(__file__).parents[2]
PROGRAM = str(ROOT / "tests" / "support" / "torchft_member.py")
PATIENCE = 120  # seconds for what takes three
LAST_SYNCS = 20  # whose losses are compared
pytestmark = pytest.mark.slow  # processes that import torch and jax


@pytest.fixture(scope="module", autouse=True)
def skip_without_torchft() -> None:
    if importlib.util.find_spec("torchft") is None:
        pytest.skip("needs torchft: pip install -e '.[torchft]'")


def make_lighthouse() -> tuple[Any, str]:
    from torchft.coordination import (  # pyright: ignore[reportMissingImports]
        LighthouseServer,
    )

    server = LighthouseServer(
        "[::]:0", min_replicas=2, join_timeout_ms=10_000, heartbeat_timeout_ms=1_500
    )
    return server, f"http://localhost:{server.address().rpartition(':')[2]}"


def start_process(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "RUST_LOG": "error"}
    environment["OMP_NUM_THREADS"] = "1"
    with (folder / f"{arguments[0]}.errors").open("ab") as errors:
        return subprocess.Popen(
            [sys.executable, PROGRAM, *arguments],
            stdout=errors,
            stderr=errors,
            env=environment,
        )


class Job:
    """Three members, whom a test kills, stops and starts again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server, self.lighthouse = make_lighthouse()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, pause: str = "") -> None:
        (self.folder / f"{name}.paused").unlink(missing_ok=True)
        self.ask_to_pause(name, pause)
        self.processes[name] = start_process(
            self.folder, name, self.lighthouse, str(self.folder)
        )

    def ask_to_pause(self, name: str, place: str) -> None:
        (self.folder / f"{name}.pause").write_text(place)

    def wait_for_pause(self, name: str) -> None:
        wait_until((self.folder / f"{name}.paused").exists)

    def kill(self, *names: str) -> None:
        for name in names:
            self.processes[name].kill()
        for name in names:
            self.processes[name].wait()

    def read_rows(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / f"{name}.log"
        text = path.read_text() if path.exists() else ""
        # A process that was killed may have left half a line.
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    def find_last(self, name: str) -> dict[str, Any]:
        rows = self.read_rows(name)
        return rows[-1] if rows else {"syncs": 0, "size": 0, "rank": None}

    def wait_for_syncs(self, names: str, size: int, number: int = 2) -> None:
        """Waits for more syncs in which these members, and no others, take part."""
        syncs = max(self.find_last(name)["syncs"] for name in names)

        def have_synced() -> bool:
            rows = [self.find_last(name) for name in names]
            return all(x["syncs"] >= syncs + number and x["size"] == size for x in rows)

        wait_until(have_synced)

    def stop(self) -> None:
        syncs = max(self.find_last(name)["syncs"] for name in self.processes)
        (self.folder / "stop").write_text(str(syncs + 8))
        for process in self.processes.values():
            process.wait(PATIENCE)


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    job = Job(tmp_path_factory.mktemp("torchft"))
    for name in "abc":
        job.start(name)
    try:
        job.wait_for_syncs("abc", size=3)
        yield job
    finally:
        for process in job.processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()
        job.server.shutdown()


def revive(job: Job, name: str) -> None:
    job.start(name)
    job.wait_for_syncs("abc", size=3)


@pytest.mark.parametrize("place", ["steps", "sync"])
def test_the_others_go_on_where_one_is_killed(job: Job, place: str):
    job.ask_to_pause("c", place)
    job.wait_for_pause("c")
    job.kill("c")
    job.wait_for_syncs("ab", size=2)
    revive(job, "c")


def test_the_others_go_on_where_one_is_killed_while_it_takes_the_state(job: Job):
    job.kill("c")
    job.wait_for_syncs("ab", size=2)
    job.start("c", pause="healing")
    job.wait_for_pause("c")
    job.kill("c")
    job.wait_for_syncs("ab", size=2)
    revive(job, "c")


def test_the_first_member_is_no_other_than_the_rest(job: Job):
    (first_member,) = [name for name in "abc" if job.find_last(name)["rank"] == 0]
    job.kill(first_member)
    job.wait_for_syncs("abc".replace(first_member, ""), size=2)
    revive(job, first_member)


def test_below_the_least_size_the_rest_waits_and_then_goes_on(job: Job):
    job.kill("a", "b")
    time.sleep(3)
    syncs = job.find_last("c")["syncs"]
    time.sleep(2)
    assert job.find_last("c")["syncs"] == syncs
    assert job.processes["c"].poll() is None
    job.start("a")
    job.wait_for_syncs("ac", size=2)
    revive(job, "b")


def test_one_that_stands_still_is_left_behind_and_comes_back(job: Job):
    job.processes["b"].send_signal(signal.SIGSTOP)
    job.wait_for_syncs("ac", size=2)
    time.sleep(4)  # torchft_member.SYNC_TIMEOUT
    job.processes["b"].send_signal(signal.SIGCONT)
    job.wait_for_syncs("abc", size=3)


def test_after_all_kills_centers_are_equal_and_training_has_not_suffered(job: Job):
    """It reads what the tests above have left."""
    job.wait_for_syncs("abc", size=3, number=8)
    job.stop()
    assert {x.returncode for x in job.processes.values()} == {0}
    centers: dict[int, set[str]] = {}
    for name in "abc":
        for row in job.read_rows(name):
            centers.setdefault(row["syncs"], set()).add(row["center"])
    assert len(centers) > 20
    assert {sync: len(x) for sync, x in centers.items() if len(x) > 1} == {}
    losses = [row["loss"] for row in job.read_rows("a")][-LAST_SYNCS:]
    unbroken_losses = train_unbroken(job.find_last("a")["steps"])
    assert np.mean(losses) == pytest.approx(np.mean(unbroken_losses), rel=0.3)


def train_unbroken(steps: int) -> list[float]:
    """The last losses of a run of this length without kills, in one process."""
    from support import torchft_member

    rng = np.random.default_rng(5)
    batches = [torchft_member.make_batch(rng) for _ in range(3 * steps)]
    inputs = np.stack([x for x, _ in batches]).reshape(steps, 48, -1)
    targets = np.stack([y for _, y in batches]).reshape(steps, 48, -1)
    x, y = torchft_member.make_held_out()
    trainer = make_trainer("diloco", workers=3, has_buffers=True)
    state = trainer.init(read_start(has_buffers=True))
    losses = []
    ends = steps - torchft_member.PERIOD * np.arange(LAST_SYNCS)[::-1]
    for start, end in zip([0, *ends], ends, strict=False):
        rows = {"x": inputs[start:end], "y": targets[start:end]}
        state, _ = trainer.run(state, rows)
        metrics = trainer.evaluate(state, {"x": x[None], "y": y[None]})
        losses.append(float(metrics["loss"][0]))
    return losses


def make_trainer(name: str, workers: int, has_buffers: bool) -> syncalgos.DataParallel:
    from support import torchft_member

    def loss(params, batch):
        x = batch["x"]
        layer = "0"
        if has_buffers:  # torch's batch norm, in training
            x = (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5)
            x = x * params["0.weight"] + params["0.bias"]
            layer = "1"
        values = x @ params[f"{layer}.weight"].T + params[f"{layer}.bias"]
        return jnp.mean((values - batch["y"]) ** 2)

    momentum = torchft_member.MOMENTUM if has_buffers else None
    optimizer = optax.sgd(torchft_member.RATE, momentum)
    strategy = torchft_member.make_strategy(name)
    return syncalgos.DataParallel(loss, optimizer, strategy, workers=workers)


def read_start(has_buffers: bool) -> dict[str, np.ndarray]:
    from support import torchft_member

    model = torchft_member.make_model(has_buffers)
    return {k: x.detach().numpy().copy() for k, x in model.named_parameters()}


@pytest.fixture(scope="module")
def centers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, np.ndarray]]:
    """What two members found by each algorithm."""
    from support import torchft_member

    folder = tmp_path_factory.mktemp("algorithms")
    lighthouses = [make_lighthouse() for _ in torchft_member.NAMES]
    addresses = [address for _, address in lighthouses]
    processes = [
        start_process(folder, name, "algorithms", str(folder), *addresses)
        for name in "01"
    ]
    try:
        codes = [process.wait(PATIENCE) for process in processes]
        assert codes == [0, 0], (folder / "0.errors").read_text()[-2000:]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
        for server, _ in lighthouses:
            server.shutdown()
    refused = json.loads((folder / "0.refused").read_text())
    return [{**np.load(folder / f"{name}.npz"), "refused": refused} for name in "01"]


def test_means_train_as_data_parallel_does(centers: list[dict[str, np.ndarray]]):
    from support import torchft_member

    def make_worker_rows(number: int) -> dict[str, np.ndarray]:
        """One worker's batches, (steps, batch, …)."""
        rng = np.random.default_rng(number)
        batches = [torchft_member.make_batch(rng) for _ in range(torchft_member.STEPS)]
        return {
            "x": np.stack([x for x, _ in batches]),
            "y": np.stack([y for _, y in batches]),
        }

    rows = jax.tree.map(
        lambda *x: np.concatenate(x, 1), make_worker_rows(0), make_worker_rows(1)
    )
    for name in torchft_member.NAMES:
        trainer = make_trainer(name, workers=2, has_buffers=False)
        state, _ = trainer.run(trainer.init(read_start(has_buffers=False)), rows)
        for key, expected in trainer.center(state).params.items():
            for member in centers:
                np.testing.assert_allclose(
                    member[f"{name} {key}"], expected, atol=2e-5, err_msg=name
                )


def test_the_example_learns_while_one_of_three_is_killed():
    printed_text, errors = run_python(["examples/torchft_loop.py"], timeout=300)
    assert "c dies after 25 syncs" in printed_text
    # Two processes may write their lines at once, without an end between them.
    ends = re.findall(r"(\w): 150 syncs, \d members, loss ([\d.]+)", printed_text)
    assert {"a", "b"} <= {name for name, _ in ends} <= {"a", "b", "c"}, errors
    assert all(float(loss) < 1 for _, loss in ends)


def test_a_strategy_that_takes_no_mean_is_refused_in_a_line(
    centers: list[dict[str, Any]],
):
    refused = centers[0]["refused"]
    assert "only adds up, but this strategy needs ['permute']" in refused["gossip"]
    assert (
        "only adds up, but this strategy needs ['all_gather']" in refused["sparseloco"]
    )
    assert refused["fedprox"] == "Synced: a strategy of either gradients or params"
    assert refused["slowmo"].startswith("Synced: a strategy without learning_rate")
    assert refused["axis"] == "Synced: pass axis=members.peers to the strategy"
    assert all("\n" not in line for line in refused.values())
