"""The progress of a run: its steps, losses and evaluations so far."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a bad request need not import numpy
    import numpy as np

# The figures of each line of metrics.jsonl; a task may add others.
MEASURED = ("step", "train_loss", "worker_losses", "test_loss", "test_accuracy")
MEASURED += ("bytes_per_worker", "divergence", "learning_rate", "seconds")
DISPLACEMENTS = ("pseudo_gradient", "displacement_cosine", "drift")
MEASURE = "test_"  # the beginning of a held-out measure's name


@dataclass(frozen=True)
class Evaluation:
    """An evaluation of a run, in the order of its line of metrics.jsonl.

    A field is None where it is not known, or where an earlier release lacked it.

    Attributes:
        step: the local steps done.
        train_loss: the mean loss since the evaluation before.
        worker_losses: the same for each worker.
        measures: the held-out measures of the center, by name, such as "test_loss".
        bytes_per_worker: the most bytes that a worker has sent.
        divergence: the root mean square distance of the replicas to their mean.
        learning_rate: the learning rate of the last step.
        displacements: the figures of `DISPLACEMENTS` for the last round, if asked for.
        seconds: training time, without compilation and evaluation.
    """

    step: int
    train_loss: float | None
    worker_losses: Sequence[float] | None
    measures: Mapping[str, float | None]
    bytes_per_worker: float | None
    divergence: float
    learning_rate: float
    displacements: Mapping[str, float]
    seconds: float

    @property
    def test_loss(self) -> float:
        """The loss of the center; NaN if it was not finite."""
        loss = self.measures["test_loss"]
        return math.nan if loss is None else loss

    @property
    def test_accuracy(self) -> float | None:
        """The accuracy of the center; None if the task has none."""
        return self.measures["test_accuracy"]

    def to_json(self) -> dict[str, Any]:
        """Returns the line of metrics.jsonl."""
        return flatten(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Evaluation":
        """Returns the evaluation that a line holds, perhaps of an older release."""
        return cls(**unflatten(cls, content))


def find_measures(content: Mapping[str, Any]) -> dict[str, float | None]:
    """Returns the held-out measures in a line or a summary."""
    return {name: x for name, x in content.items() if name.startswith(MEASURE)}


def find_displacements(content: Mapping[str, Any]) -> dict[str, float]:
    """Returns the displacements in a line or a summary."""
    return {name: content[name] for name in DISPLACEMENTS if name in content}


def flatten(record: Any) -> dict[str, Any]:
    """Returns an evaluation's or a summary's fields, with each figure beside them."""
    content: dict[str, Any] = {}
    for item in fields(record):
        value = getattr(record, item.name)
        if item.name in ("measures", "displacements"):
            content.update(value)
        else:
            content[item.name] = value
    return content


def unflatten(kind: type, content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a kind of record from its content; None if it lacks one."""
    values: dict[str, Any] = {x.name: content.get(x.name) for x in fields(kind)}
    values["measures"] = find_measures(content)
    values["displacements"] = find_displacements(content)
    return values


@dataclass
class Progress:
    """Training progress: step, metrics and timings, updated during the run.

    A field that an older checkpoint lacks has its default.

    Attributes:
        step: local steps done.
        evaluations: the evaluations, which are the lines of metrics.jsonl.
        losses: the losses of the steps since the last evaluation.
        worker_losses: each worker's sum of losses over the same steps; empty if some
            are not known.
        seconds: training time, without compilation and evaluation.
        first_loss: the loss of the first step; None before it.
        resumed_at: the steps at which the run was resumed.
        sent_before: the most bytes that a worker had sent when the number of workers
            last changed, if known.
        sent_since: the step at which the number of workers last changed.
        earlier_seconds: the total time of the run until its last stop.
        lane_form: the lane form of the last dispatch; None before it.
        run_id: the id of the run, in all shards of its checkpoints; drawn at random
            when the run starts, or when its number of workers changes.
        saved: the step of the newest complete checkpoint; 0 if there is none.
        decided: (step, number of the decision) of each sync that the data triggered;
            both from 0.
    """

    step: int = 0
    evaluations: list[Evaluation] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    first_loss: float | None = None
    resumed_at: list[int] = field(default_factory=list)
    sent_before: float | None = 0.0
    sent_since: int = 0
    earlier_seconds: float = 0.0
    lane_form: str | None = None
    run_id: str = ""
    saved: int = 0
    decided: list[list[int]] = field(default_factory=list)
    worker_losses: list[float] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Returns the progress as a checkpoint holds it."""
        content: dict[str, Any] = {}
        for item in fields(self):
            if item.name == "evaluations":
                content["lines"] = [x.to_json() for x in self.evaluations]
            else:
                content[item.name] = getattr(self, item.name)
        return content

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Progress":
        """Returns the progress that a checkpoint holds.

        Raises:
            TypeError: a field is unknown.
        """
        values = {**content}
        lines = values.pop("lines", [])
        return cls(evaluations=[Evaluation.from_json(x) for x in lines], **values)

    def add_dispatch(
        self,
        losses: list[float],
        worker_losses: "np.ndarray",
        seconds: float,
        decided: Iterable[Sequence[int]] = (),
    ) -> None:
        """Adds a dispatch.

        Args:
            losses: the losses of its steps.
            worker_losses: each worker's losses, (steps, workers).
            seconds: its training time.
            decided: like the attribute, with steps counted from the dispatch's first.
        """
        earlier_sums = self.worker_losses
        if not self.losses:
            earlier_sums = [0.0] * worker_losses.shape[1]
        # They differ after a checkpoint of another version or number of workers.
        if len(earlier_sums) == worker_losses.shape[1]:
            # Summed step by step: any split into dispatches gives the same sums.
            sums = worker_losses.copy()
            sums[0] += earlier_sums
            self.worker_losses = sums.cumsum(0)[-1].tolist()
        else:
            self.worker_losses = []
        if self.first_loss is None:
            self.first_loss = losses[0]
        self.decided += [[self.step + step, number] for step, number in decided]
        self.step += len(losses)
        self.losses += losses
        self.seconds += seconds

    def add_evaluation(self, evaluation: Evaluation) -> None:
        """Adds an evaluation."""
        self.evaluations.append(evaluation)
        self.losses = []
        self.worker_losses = []

    def mean_worker_losses(self) -> list[float] | None:
        """Returns each worker's mean loss since the last evaluation, if known."""
        # Six digits: there may be hundreds of workers.
        means = [float(f"{x / len(self.losses):.6g}") for x in self.worker_losses]
        return means or None


def find_best(evaluations: Iterable[Evaluation]) -> Evaluation | None:
    """Returns the evaluation with the highest accuracy, or else the lowest loss.

    Among equals, it is the first. None if no loss is finite, as after a divergence.
    """

    def worth(evaluation: Evaluation) -> float:
        accuracy = evaluation.test_accuracy
        return -evaluation.test_loss if accuracy is None else accuracy

    finite = (x for x in evaluations if math.isfinite(x.test_loss))
    return max(finite, key=worth, default=None)
