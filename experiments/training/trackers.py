"""Trackers: TensorBoard, wandb, trackio and mlflow, or a custom object.

Each library is imported at the start of a run that uses it. An error in a tracker does
not end the run: it prints a warning, and the tracker is no longer called.
"""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from importlib import import_module, util
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from experiments.cli.exits import say
from experiments.training.records import Line, plain
from syncalgos import checks

PROJECT = "syncalgos"
OURS = f".{PROJECT}"  # the suffix of our event files; the folder may hold others


class Tracked(NamedTuple):
    """A run, as trackers see it.

    Attributes:
        name: the name of the run; in a study, the run's folder there.
        id: the id of the run, which a resumed run keeps.
        config: the settings, by name.
        folder: the folder for the tracker's own files; None if nothing is written.
        lines: the lines of metrics.jsonl from before the run was resumed.
        study: the name of the run's study; "" if there is none.
    """

    name: str
    id: str
    config: Mapping[str, Any]
    folder: Path | None = None
    lines: Sequence[Line] = ()
    study: str = ""


class Tracker(Protocol):
    """A recorder of runs. Each method may raise."""

    def start(self, run: Tracked) -> None:
        """Starts or resumes a run; runs come one after another."""

    def log(self, line: Line) -> None:
        """Records an evaluation, a line of metrics.jsonl."""

    def finish(self, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        """Ends the run.

        Args:
            summary: the content of summary.json.
            files: files to keep with the run, such as a study's report.
        """


class TensorBoard:
    """Event files in FOLDER/tensorboard, all of which a resumed run rewrites."""

    def start(self, run: Tracked) -> None:
        from tensorboardX import SummaryWriter

        folder = Path(run.folder or ".") / "tensorboard"
        folder /= run.name if run.study else ""
        # Earlier versions wrote a study's runs without this suffix.
        for earlier in folder.glob(f"events.out.tfevents.*{'' if run.study else OURS}"):
            earlier.unlink()  # TensorBoard would show both
        self._writer = SummaryWriter(str(folder), filename_suffix=OURS)
        self._add_text("config", run.config)
        for line in run.lines:
            self.log(line)

    def log(self, line: Line) -> None:
        # The "relative" axis then shows training time.
        seconds = line.get("seconds") or 0.0
        for name, value, at in points(line):
            self._writer.add_scalar(name, value, at, seconds)
        self._writer.flush()

    def finish(self, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        self._add_text("summary", summary)
        for path in files:
            if path.suffix == ".md":
                self._writer.add_text(path.stem, path.read_text())
        self._writer.close()

    def _add_text(self, name: str, content: Mapping[str, Any]) -> None:
        text = json.dumps(plain(content), indent=2, default=repr)
        self._writer.add_text(name, f"```json\n{text}\n```")


class Wandb:
    """A run of Weights & Biases, with its files in FOLDER/wandb."""

    def start(self, run: Tracked) -> None:
        self._wandb = wandb = import_module("wandb")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.name,
            group=run.study or None,
            id=run.id,
            resume="allow",
            reinit="create_new",
            dir=run.folder,
            config=_as_json(run.config),
            # A study has hundreds of runs.
            settings=wandb.Settings(console="off", silent=bool(run.study)),
        )

    def log(self, line: Line) -> None:
        self._run.log(numbers(line), step=line["step"])

    def finish(self, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        self._run.summary.update(_as_json(summary))
        if files:
            report = self._wandb.Artifact(f"report-{self._run.id}", "report")
            for path in files:
                report.add_file(str(path))
            self._run.log_artifact(report)
        self._run.finish()


class Trackio:
    """A run of trackio, in the folder TRACKIO_DIR."""

    def start(self, run: Tracked) -> None:
        self._trackio, self._step = import_module("trackio"), 0
        self._run = self._trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=f"{run.name}-{run.id[:8]}",  # trackio resumes a run by its name
            group=run.study or None,
            config=_as_json(run.config),
            resume="allow",
            embed=False,
        )

    def log(self, line: Line) -> None:
        self._step = line["step"]
        self._run.log(numbers(line), step=self._step)

    def finish(self, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        ended = {f"summary/{name}": x for name, x in numbers(summary).items()}
        self._run.log(ended, step=self._step)
        if files:
            report = self._trackio.Artifact("report", type="report")
            for path in files:
                report.add_file(path)
            self._run.log_artifact(report)
        self._trackio.finish()


class MLflow:
    """A run of mlflow at MLFLOW_TRACKING_URI, or else in FOLDER/mlflow.db."""

    def start(self, run: Tracked) -> None:
        self._entities = import_module("mlflow.entities")
        uri, location = os.environ.get("MLFLOW_TRACKING_URI"), None
        if uri is None and run.folder is not None:
            folder = run.folder.absolute()
            uri, location = f"sqlite:///{folder}/mlflow.db", f"{folder}/mlartifacts"
        self._client = client = import_module("mlflow").MlflowClient(uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = client.get_experiment_by_name(name)
        experiment = (
            client.create_experiment(name, artifact_location=location)
            if found is None
            else found.experiment_id
        )
        self._last = 0
        its_own = f"tags.syncalgos_run = '{run.id}'"
        if earlier := client.search_runs([experiment], its_own):
            self._id = earlier[0].info.run_id
            before = client.get_metric_history(self._id, "seconds")
            self._last = max((x.step for x in before), default=0)
            client.update_run(self._id, status="RUNNING")
            return
        tags = {"syncalgos_run": run.id, "syncalgos_study": run.study}
        made = client.create_run(experiment, tags=tags, run_name=run.name)
        self._id = made.info.run_id
        param = self._entities.Param
        params = [param(name, str(x)[:500]) for name, x in run.config.items()]
        for first in range(0, len(params), 100):  # at most 100 in a call
            client.log_batch(self._id, params=params[first : first + 100])

    def log(self, line: Line) -> None:
        if line["step"] <= self._last:
            return  # it was logged before the run was resumed
        now = int(time.time() * 1000)
        metric = self._entities.Metric
        found = [metric(name, value, now, at) for name, value, at in points(line)]
        self._client.log_batch(self._id, metrics=found)

    def finish(self, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        self._client.log_dict(self._id, _as_json(summary), "summary.json")
        for path in files:
            self._client.log_artifact(self._id, str(path))
        self._client.set_terminated(self._id)


class _Kind(NamedTuple):
    """A named tracker, and the module that it needs."""

    make: Callable[[], Tracker]
    module: str


KINDS = {
    "tensorboard": _Kind(TensorBoard, "tensorboardX"),
    "wandb": _Kind(Wandb, "wandb"),
    "trackio": _Kind(Trackio, "trackio"),
    "mlflow": _Kind(MLflow, "mlflow"),
}


def check(names: Iterable[str]) -> None:
    """Raises a ValueError for an unknown tracker, or one that is not installed."""
    for name in names:
        checks.one_of("--track", name, KINDS)
        if util.find_spec(module := KINDS[name].module) is None:
            raise ValueError(
                f"--track {name} needs {module}, which is not installed: run "
                "pip install -e '.[trackers]' in the checkout of syncalgos"
            )


class Tracking:
    """Calls several trackers, for one run after another.

    Args:
        names: names of trackers.
        own: custom trackers.
    """

    def __init__(self, names: Iterable[str], own: Iterable[Tracker] = ()):
        self._left = [(name, KINDS[name].make()) for name in dict.fromkeys(names)]
        self._left += [(type(each).__name__, each) for each in own]

    def start(self, run: Tracked) -> None:
        """Starts or resumes a run."""
        self._tell(lambda tracker: tracker.start(run))

    def log(self, line: Line) -> None:
        """Records an evaluation."""
        self._tell(lambda tracker: tracker.log(line))

    def finish(self, summary: Mapping[str, Any], files: Sequence[Path] = ()) -> None:
        """Ends the run."""
        self._tell(lambda tracker: tracker.finish(summary, files))

    def _tell(self, call: Callable[[Tracker], None]) -> None:
        with redirect_stdout(sys.stderr):  # stdout holds only the summary
            self._left = [each for each in self._left if _is_told(*each, call)]


def _is_told(name: str, tracker: Tracker, call: Callable[[Tracker], None]) -> bool:
    """Calls a tracker; returns whether it succeeded, and warns if not."""
    try:
        call(tracker)
    except (Exception, SystemExit) as error:
        reason = " ".join(str(error).split())[:300]
        say(
            f"--track {name} failed, and is no longer used: "
            f"{type(error).__name__}: {reason}"
        )
        return False
    return True


def numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """Returns the finite numbers of a line by name, except for its step."""
    return {
        name: x
        for name, x in line.items()
        if name != "step" and type(x) in (int, float) and math.isfinite(x)
    }


def points(line: Line) -> Iterator[tuple[str, float, int]]:
    """Yields (name, value, position): by step; losses also by bytes."""
    found = numbers(line)
    for name, value in found.items():
        yield name, value, line["step"]
        if name.startswith(("train_", "test_")) and "bytes_per_worker" in found:
            yield f"by_bytes/{name}", value, int(found["bytes_per_worker"])


def _as_json(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a record with JSON's types only."""
    return json.loads(json.dumps(plain(content), default=repr))
