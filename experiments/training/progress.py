"""What a run has behind it, besides the engine's state."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

Line = dict[str, Any]


@dataclass
class Progress:
    """What a run has behind it, besides the engine's state; it grows as the run goes.

    Attributes:
        step: local steps done.
        lines: of metrics.jsonl.
        losses: of the steps since the last line.
        seconds: of training, compilation and evaluation excluded.
        first_loss: of the first step; None before it.
        resumed_at: the steps from which it went on after a stop.
        sent_before: bytes that each worker had sent when the number of workers last
            changed, if they are known.
        sent_since: the step at which that was.
        earlier_seconds: all that it took until it was stopped last.
        lane_form: how the lanes of the last dispatch were run; None before it.
        run_id: of the run, in all parts of its checkpoints: drawn at random where it
            began, or was given new workers.
        saved: the step of the newest checkpoint that is whole; 0: there is none.
        decided: where syncs are decided on by data: (step, number of the decision) of
            each that was to sync; from 0.
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

    def stepped(
        self, losses: list[float], seconds: float, decided: Iterable[Sequence[int]] = ()
    ) -> None:
        """Notes a dispatch, whose decisions are counted from its first step."""
        if self.first_loss is None:
            self.first_loss = losses[0]
        self.decided += [[self.step + step, number] for step, number in decided]
        self.step += len(losses)
        self.losses += losses
        self.seconds += seconds

    def told(self, line: Line) -> None:
        """Notes an evaluation."""
        self.lines.append(line)
        self.losses = []
