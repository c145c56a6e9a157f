"""Makes single runs of a study in this process."""

import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from experiments.checkpoint import lock
from experiments.cli import terminal
from experiments.cli.errors import BadRequest, in_one_line
from experiments.cli.flags import PROGRAM, words_of
from experiments.study.grid import Loader, is_done
from experiments.study.running import own_files
from experiments.training import files, run_folder
from experiments.training.config import RunConfig
from experiments.training.one_run import Folder
from experiments.training.plan import Programs
from experiments.training.prepare import make_run

PAUSE = 0.1  # seconds between two reports of a step


class Stepped(NamedTuple):
    """Some of a run's local steps are done; the loss is that of the last one."""

    done: int
    steps: int
    loss: float


class Made(NamedTuple):
    """The run is complete; the words are its results."""

    words: str


class Refused(NamedTuple):
    """The run could not be made.

    Attributes:
        line: the reason, in one line.
        is_request: whether its flags were refused.
    """

    line: str
    is_request: bool = False


News = Stepped | str
"""News about a run in progress; a text is a warning."""


class Stopped(Exception):
    """The user asked to stop; the current run is discarded."""


class _Steps:
    """Reports a run's steps now and then; its evaluations are in its files."""

    def __init__(self, steps: int, report: Callable[[News], None]):
        self._steps, self._report, self._last = steps, report, 0.0

    def step(self, done: int, loss: float) -> None:
        if time.monotonic() - self._last > PAUSE:
            self._last = time.monotonic()
            self._report(Stepped(done, self._steps, loss))

    def line(self, text: str) -> None: ...


class Maker:
    """Makes runs one after the other, reusing the programs of the last if possible.

    Args:
        loader: makes plans, and keeps their data.
    """

    def __init__(self, loader: Loader):
        self._loader = loader
        self._programs: Programs | None = None

    def make(
        self,
        config: RunConfig,
        folder: Path,
        report: Callable[[News], None],
        asked_to_stop: Callable[[], int],
    ) -> Made | Refused:
        """Makes one run.

        Args:
            config: the config of the run.
            folder: the folder of its files, which appears once all of them exist.
            report: function that is called with its news.
            asked_to_stop: function that is called before each dispatch.

        Raises:
            Stopped: it was asked to stop.
            OSError: a file cannot be written.
        """
        started = time.perf_counter()
        try:
            clear(folder)
            plan, data = self._loader.plan(config, self._programs)
            self._programs = plan.programs
            run = make_run(plan, data)
            if why := run.rounds.untrained:
                start = "the results will be those of the initial model"
                report(f"{start}: {why}")
            with unfinished(folder) as place:
                words = [*words_of(config), "--seed", str(config.seed)]
                own = Folder(run, place, started)
                own.record([*PROGRAM.split(), *words])
                shown = _Steps(run.config.steps, report)
                outcome, summary = own.train(shown, asked_to_stop)
                if outcome.stopped:
                    raise Stopped
                summary["total_seconds"] = round(time.perf_counter() - started, 3)
                run_folder.finish(place, summary, outcome.progress.lines)
        except (Stopped, OSError):
            raise
        # The other runs continue: one failure must not stop hundreds of runs.
        except Exception as error:
            return described(error)
        return Made(_results(summary))


def described(error: Exception) -> Refused:
    """Returns an error in one line."""
    text, is_request = in_one_line(error), isinstance(error, BadRequest)
    return Refused(
        text if is_request else f"{type(error).__name__}: {text}", is_request
    )


def clear(folder: Path) -> None:
    """Removes the remains of an interrupted run.

    Raises:
        BadRequest: a command of `compare --list` is making it.
    """
    if folder.exists() and not is_done(folder):
        with lock.held(folder):
            own_files.remove(folder)
        with suppress(OSError):  # it holds something of the user's
            folder.rmdir()


@contextmanager
def unfinished(folder: Path) -> Iterator[Path]:
    """Yields a temporary folder for a run's files, and renames it at the end."""
    # A folder gets its name once all its files exist, so no run is half made. Another
    # process may be making the same run, if the connection to it was lost.
    place = folder.with_name(f".{folder.name}-{secrets.token_hex(4)}")
    try:
        yield place
        clear(folder)
        _rename(place, folder)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _rename(place: Path, folder: Path) -> None:
    """Renames a run's folder, unless another process has made the same run."""
    try:
        place.replace(folder)
    except OSError:
        if is_done(folder):
            return
        if not folder.is_dir():
            raise
        # It holds other files of the user. The summary comes last: it marks a made run.
        for name in run_folder.NAMES:
            (place / name).replace(folder / name)
    files.sync_folder(folder.parent)


def _results(summary: dict[str, Any]) -> str:
    """Returns the results of a run as text, without its training loss."""
    if summary["diverged"]:
        return f"diverged at step {summary['diverged_at']}"
    shown = terminal.measured(summary, summary["validation"])
    loss, *others = [x for x in shown if x != "train loss" and shown[x] is not None]
    # Only the first names its data, so that a line has room for its run's name.
    names = {loss: loss, **{name: name.partition(" ")[2] for name in others}}
    figures = [f"{names[x]} {terminal.figure(shown[x])}" for x in names]
    return ", ".join([*figures, f"{summary['total_seconds']:.1f} s"])
