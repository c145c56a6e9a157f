"""The progress of a run: its steps, losses and evaluations so far."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a bad request need not import numpy
    import numpy as np

Line = dict[str, Any]
"""An evaluation, which is a line of metrics.jsonl."""

# The figures of each line of metrics.jsonl; a task may add others.
MEASURED = ("step", "train_loss", "worker_losses", "test_loss", "test_accuracy")
MEASURED += ("bytes_per_worker", "divergence", "learning_rate", "seconds")
DISPLACEMENTS = ("pseudo_gradient", "displacement_cosine", "drift")


@dataclass
class Progress:
    """Training progress: step, metrics and timings, updated during the run.

    A field that an older checkpoint lacks has its default.

    Attributes:
        step: local steps done.
        lines: the lines of metrics.jsonl.
        losses: the losses of the steps since the last line.
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
    lines: list[Line] = field(default_factory=list)
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

    def stepped(
        self,
        losses: list[float],
        of_workers: "np.ndarray",
        seconds: float,
        decided: Iterable[Sequence[int]] = (),
    ) -> None:
        """Adds a dispatch.

        Args:
            losses: the losses of its steps.
            of_workers: each worker's losses, (steps, workers).
            seconds: its training time.
            decided: like the attribute, with steps counted from the dispatch's first.
        """
        before = self.worker_losses if self.losses else [0.0] * of_workers.shape[1]
        # They differ after a checkpoint of another version or number of workers.
        if len(before) == of_workers.shape[1]:
            # Summed step by step: any split into dispatches gives the same sums.
            sums = of_workers.copy()
            sums[0] += before
            self.worker_losses = sums.cumsum(0)[-1].tolist()
        else:
            self.worker_losses = []
        if self.first_loss is None:
            self.first_loss = losses[0]
        self.decided += [[self.step + step, number] for step, number in decided]
        self.step += len(losses)
        self.losses += losses
        self.seconds += seconds

    def evaluated(self, line: Line) -> None:
        """Adds an evaluation."""
        self.lines.append(line)
        self.losses = []
        self.worker_losses = []

    def mean_worker_losses(self) -> list[float] | None:
        """Returns each worker's mean loss since the last line; None if not known."""
        # Six digits: there may be hundreds of workers.
        means = [float(f"{x / len(self.losses):.6g}") for x in self.worker_losses]
        return means or None


def best(lines: Iterable[Line]) -> Line | None:
    """Returns the evaluation with the highest accuracy, or else the lowest loss.

    Among equals, it is the first. None if no loss is finite, as after a divergence.
    """

    def worth(line: Line) -> float:
        accuracy = line["test_accuracy"]
        loss = line["test_loss"]
        return -loss if accuracy is None else accuracy

    losses = [(x, x["test_loss"]) for x in lines]
    sound = (x for x, loss in losses if loss is not None and math.isfinite(loss))
    return max(sound, key=worth, default=None)
