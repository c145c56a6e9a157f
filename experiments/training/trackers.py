"""Trackers: TensorBoard, wandb, or a custom object.

Each library is imported at the start of a run that uses it. An error in a tracker does
not end the run: it prints a warning, and the tracker is no longer called.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from importlib import import_module, util
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from experiments.command.errors import STOPS, in_one_line
from experiments.command.stopping import say
from experiments.files import to_json_value
from syncalgos import checks

Line = Mapping[str, Any]
"""A line of metrics.jsonl, which holds an evaluation."""

PROJECT = "syncalgos"
LONGEST = 300  # characters of an error
OURS = f".{PROJECT}"  # the suffix of our event files; the folder may hold others


class Tracked(NamedTuple):
    """A run, as trackers see it.

    Attributes:
        name: the name of the run.
        id: the id of the run, which a resumed run keeps.
        config: the settings, by name.
        folder: the folder for the tracker's own files; None if nothing is written.
        lines: the lines of metrics.jsonl from before the run was resumed.
    """

    name: str
    id: str
    config: Mapping[str, Any]
    folder: Path | None = None
    lines: Sequence[Line] = ()


class Tracker(Protocol):
    """A recorder of a run. Each method may raise."""

    def start(self, run: Tracked) -> None:
        """Starts or resumes the run."""

    def log(self, line: Line) -> None:
        """Records an evaluation, a line of metrics.jsonl."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Ends the run, with the content of summary.json."""


class TensorBoard:
    """Event files in FOLDER/tensorboard, all of which a resumed run rewrites."""

    module = "tensorboardX"

    def start(self, run: Tracked) -> None:
        from tensorboardX import SummaryWriter

        folder = Path(run.folder or ".") / "tensorboard"
        for earlier in folder.glob(f"events.out.tfevents.*{OURS}"):
            earlier.unlink()  # TensorBoard would show both
        self._writer = SummaryWriter(str(folder), filename_suffix=OURS)
        self._add_text("config", run.config)
        for line in run.lines:
            self.log(line)

    def log(self, line: Line) -> None:
        # The "relative" axis then shows training time.
        seconds = line.get("seconds") or 0.0
        for name, value, position in points(line):
            self._writer.add_scalar(name, value, position, seconds)
        self._writer.flush()

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._add_text("summary", summary)
        self._writer.close()

    def _add_text(self, name: str, content: Mapping[str, Any]) -> None:
        text = json.dumps(to_json_value(content), indent=2, default=repr)
        self._writer.add_text(name, f"```json\n{text}\n```")


class Wandb:
    """A run of Weights & Biases, with its files in FOLDER/wandb."""

    module = "wandb"

    def start(self, run: Tracked) -> None:
        wandb = import_module("wandb")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.name,
            id=run.id,
            resume="allow",
            reinit="create_new",
            dir=run.folder,
            config=_as_json(run.config),
            settings=wandb.Settings(console="off"),
        )

    def log(self, line: Line) -> None:
        self._run.log(finite_numbers(line), step=line["step"])

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._run.summary.update(_as_json(summary))
        self._run.finish()


KINDS = {"tensorboard": TensorBoard, "wandb": Wandb}
# Others that users ask for, and what to use.
INSTEAD: dict[str, str] = dict.fromkeys(
    ("mlflow", "trackio"), "write a tracker of your own, as docs/trackers.md does"
)


def check_names(names: Iterable[str]) -> None:
    """Raises a ValueError for an unknown tracker, or one that is not installed."""
    for name in names:
        checks.one_of("--track", name, KINDS, INSTEAD)
        module = KINDS[name].module
        if util.find_spec(module) is None:
            raise ValueError(
                f"--track {name} needs {module}, which is not installed: run pip "
                "install -e '.[trackers]' in the checkout of syncalgos"
            )


class Tracking:
    """Calls several trackers of a run.

    Args:
        names: names of trackers.
        custom: custom trackers.

    Attributes:
        failed: a line for each tracker that failed.
    """

    def __init__(self, names: Iterable[str], custom: Iterable[Tracker] = ()):
        self._active: list[tuple[str, Tracker]]
        self._active = [(name, KINDS[name]()) for name in dict.fromkeys(names)]
        self._active += [(type(tracker).__name__, tracker) for tracker in custom]
        self.failed: list[str] = []

    def start(self, run: Tracked) -> None:
        """Starts or resumes the run."""
        self._tell(lambda tracker: tracker.start(run))

    def log(self, line: Line) -> None:
        """Records an evaluation."""
        self._tell(lambda tracker: tracker.log(line))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Ends the run."""
        self._tell(lambda tracker: tracker.finish(summary))

    def _tell(self, call: Callable[[Tracker], None]) -> None:
        with redirect_stdout(sys.stderr):  # stdout holds only the summary
            for named_tracker in [*self._active]:
                name, tracker = named_tracker
                try:
                    call(tracker)
                except STOPS:
                    raise
                except BaseException as error:  # whatever a library raises
                    self._active.remove(named_tracker)
                    line = (
                        f"--track {name} failed, and is no longer used: "
                        f"{type(error).__name__}: {in_one_line(error)[:LONGEST]}"
                    )
                    self.failed.append(line)
                    say(line)


def finite_numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """Returns the finite numbers of a line by name, except for its step."""
    return {
        name: x
        for name, x in line.items()
        if name != "step" and type(x) in (int, float) and math.isfinite(x)
    }


def points(line: Line) -> Iterator[tuple[str, float, int]]:
    """Yields (name, value, position): by step; losses also by bytes."""
    values = finite_numbers(line)
    for name, value in values.items():
        yield name, value, line["step"]
        if name.startswith(("train_", "test_")) and "bytes_per_worker" in values:
            yield f"by_bytes/{name}", value, int(values["bytes_per_worker"])


def _as_json(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a record with JSON's types only."""
    return json.loads(json.dumps(to_json_value(content), default=repr))
