"""The summary of a run: what summary.json holds."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import syncalgos
from experiments.tasks.task import Task
from experiments.training import sends
from experiments.training.config import Settings
from experiments.training.loop import Outcome
from experiments.training.prepare import Run
from experiments.training.process_group import on_host
from experiments.training.progress import flatten, unflatten
from syncalgos import Replica, Strategy, network


@dataclass(frozen=True)
class Summary:
    """The results of a run, in the order of summary.json.

    A field is None where it does not apply, or where an earlier release lacked it.

    Attributes:
        algo: the name of the algorithm.
        arguments: the values of its own flags.
        task: the name of the task.
        task_arguments: the values of its own flags.
        seed: the seed of the run.
        workers: the number of workers.
        batch_size: the global batch size.
        optimizer: the inner optimizer.
        lr: the learning rate, as set.
        accumulate: the number of microbatches.
        partition: how the workers divide the examples.
        validation: the share of the training data that is evaluated on; None if the
            test data is.
        effective_lr: the effective learning rate; NaN if it was not found.
        backend: how workers are mapped to devices.
        devices: the number of devices.
        lanes: the number of workers of a device.
        mesh: sizes of the axes within a worker.
        processes: the number of processes.
        platform: the platform of the devices.
        processor: the name of the processor.
        examples: the numbers of examples in the data, "train" and "test".
        versions: the versions of the packages.
        commit: the commit of the code.
        train_loss: the mean loss since the evaluation before.
        worker_losses: the same for each worker.
        measures: the held-out measures of the center, by name, such as "test_loss".
        bytes_per_worker: the most bytes that a worker has sent.
        divergence: the root mean square distance of the replicas to their mean.
        learning_rate: the learning rate at the end.
        displacements: the figures of `DISPLACEMENTS` for the last round, if asked for.
        seconds: training time, without compilation and evaluation.
        steps: the local steps done.
        syncs: the steps at which anything was sent.
        decided: how many of these the data triggered.
        steps_per_second: local steps in a second of training.
        params_sha256: the checksum of the center's params.
        temp_bytes: bytes of intermediate results on a device.
        device_bytes: bytes of the state on a device, by part.
        device_bytes_without_mesh: the same if a worker had one device.
        bytes_per_device: the most bytes that a device has sent.
        lane_form: the form of the lanes.
        not_counted: what the bytes do not include.
        sends: the messages of the run, for modelling their time.
        center_step: the last local step that the center includes.
        export: the file of the exported model.
        diverged: whether the run diverged.
        diverged_at: the local step at which it did.
        not_finite_workers: the workers whose loss was not finite there.
        stopped: whether a signal stopped it.
        resumed_at: the steps at which it was resumed.
        correct: which held-out examples the center is right on, a bit each, in hex;
            runs of studies alone have it.
        total_seconds: the time of the run in all.
    """

    algo: str
    arguments: Mapping[str, Any]
    task: str
    task_arguments: Mapping[str, Any]
    seed: int
    workers: int
    batch_size: int
    optimizer: str
    lr: float
    accumulate: int
    partition: str
    validation: float | None
    effective_lr: float | None
    backend: str
    devices: int
    lanes: int
    mesh: Mapping[str, int]
    processes: int
    platform: str
    processor: str | None
    examples: Mapping[str, int]
    versions: Mapping[str, str]
    commit: str | None
    train_loss: float | None
    worker_losses: Sequence[float] | None
    measures: Mapping[str, float | None]
    bytes_per_worker: float | None
    divergence: float
    learning_rate: float
    displacements: Mapping[str, float]
    seconds: float
    steps: int
    syncs: int | None
    decided: int | None
    steps_per_second: float
    params_sha256: str
    temp_bytes: int | None
    device_bytes: Mapping[str, int]
    device_bytes_without_mesh: Mapping[str, int]
    bytes_per_device: float | None
    lane_form: str | None
    not_counted: str | None
    sends: Mapping[str, Any] | None
    center_step: int
    export: str | None
    diverged: bool
    diverged_at: int | None
    not_finite_workers: Sequence[int]
    stopped: bool
    resumed_at: Sequence[int]
    correct: str | None = None
    total_seconds: float | None = None

    @property
    def is_finite(self) -> bool:
        """Whether the losses were finite, the last test loss among them."""
        return not self.diverged and self.measures["test_loss"] is not None

    def to_json(self) -> dict[str, Any]:
        """Returns the content of summary.json."""
        content = flatten(self)
        for name in ("total_seconds", "correct"):
            if content[name] is None:
                del content[name]
        return content

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Summary":
        """Returns the summary that summary.json holds, perhaps of an older release."""
        values = unflatten(cls, content)
        values["mesh"] = content.get("mesh", {})
        values["learning_rate"] = content.get("learning_rate", content.get("lr"))
        return cls(**values)


def summarize(run: Run, outcome: Outcome) -> Summary:
    """Returns the summary of a run, without the fields that its writer adds."""
    progress = outcome.progress
    evaluation = outcome.last_evaluation
    method = run.plan.method
    steps = evaluation.step
    seconds = progress.seconds
    num_syncs = sent_messages = num_decided = None
    # Syncs of other workers, before --resume-center, are in the bytes alone.
    communication = None
    if not progress.sent_since:
        communication = run.rounds.communication(progress)
    if communication is not None:
        bytes_by_step = communication.per_step[:steps]
        num_syncs = int((np.diff(bytes_by_step, prepend=0.0) > 0).sum())
        delay = delay_of_sends(run.config, run.task, method.algorithm)
        sent_messages = {**sends.to_json(network.sends(communication)), "delay": delay}
    if not progress.sent_since and syncalgos.describe(method.strategy).decides:
        num_decided = len({step for step, _ in progress.decided})
    figures = evaluation.to_json()
    del figures["step"]
    num_devices = run.config.worker_devices
    return Summary.from_json(
        {
            **run.facts,
            **figures,
            "steps": steps,
            "syncs": num_syncs,
            "decided": num_decided,
            "steps_per_second": steps / seconds if seconds else 0.0,
            "params_sha256": params_sha256(outcome.center),
            "temp_bytes": run.trainer.temp_bytes,
            "device_bytes": sends.device_bytes(outcome.state),
            "device_bytes_without_mesh": sends.device_bytes(
                outcome.state, in_mesh=False
            ),
            "bytes_per_device": sends.bytes_per_device(
                evaluation.bytes_per_worker, num_devices
            ),
            "lane_form": progress.lane_form,
            "not_counted": run.task.sends or None,
            "sends": sent_messages,  # for modelling their time
            "center_step": run.rounds.center_step(steps),
            "diverged": outcome.diverged,
            "diverged_at": outcome.diverged_at,
            "not_finite_workers": outcome.not_finite,
            "stopped": bool(outcome.stopped),
            "resumed_at": progress.resumed_at,
        }
    )


def delay_of_sends(config: Settings, task: Task, algorithm: Strategy) -> int:
    """Returns how many local steps a message may take; 0 if the run waits for it."""
    # An average of the optimizer's state, and shared tables, are used at once.
    waits = config.opt_state_at_sync == "average" or task.kept == "shared"
    return 0 if waits else algorithm.late


def params_sha256(replica: Replica) -> str:
    """Returns the SHA-256 of the params' leaves in order."""
    # The same command gives the same hash: tests use it to show unchanged numbers.
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(replica.params):
        digest.update(on_host(leaf).tobytes())
    return digest.hexdigest()
