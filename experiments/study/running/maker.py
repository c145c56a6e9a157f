"""Makes single runs of a study in this process."""

import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import jax

from experiments.checkpoint import lock
from experiments.cli import terminal
from experiments.cli.flags import PROGRAM
from experiments.study.grid import Loader, is_done
from experiments.study.running import own_files
from experiments.training import records
from experiments.training.measurements.draws import draws_from_seed
from experiments.training.recording import record_config, train_and_record
from experiments.training.run import Run, make_run, reseeded


class Stopped(Exception):
    """The user asked to stop: the present run is discarded."""


class RunReport(terminal.Report, Protocol):
    """The display of one run."""

    def begin(self, steps: int) -> None:
        """Starts a run of so many local steps."""
        ...

    def note(self, text: str) -> None:
        """Shows a caution about the run."""
        ...


class Maker:
    """Makes runs, and keeps the program of the last ones for those that share it.

    Args:
        loader: makes plans, and keeps their data.
    """

    def __init__(self, loader: Loader):
        self._loader = loader
        self._argv: Sequence[str] = ()
        self._job: Run | None = None
        self._draws: bool | None = None  # None: not known yet

    def make(
        self,
        argv: Sequence[str],
        seed: int,
        folder: Path,
        report: RunReport,
        asked_to_stop: Callable[[], int],
    ) -> str:
        """Makes one run, and returns its results in words.

        Args:
            argv: flags of experiments.run, without --seed.
            seed: of the run.
            folder: of its files; it exists once all of them do.
            report: where progress is shown.
            asked_to_stop: looked at before each dispatch.

        Raises:
            BadRequest: flags that a run cannot have.
            Stopped: it was asked to.
            OSError: a file cannot be written.
        """
        started = time.perf_counter()
        clear(folder)
        is_first = tuple(argv) != self._argv
        job = self._prepared(tuple(argv), seed)
        if is_first and job.rounds.untrained:
            report.note(
                "the figures will be of the model as it was at the start: "
                f"{job.rounds.untrained}"
            )
        report.begin(job.config.steps)
        with unfinished(folder) as place:
            summary = _trained(job, argv, place, report, asked_to_stop, started)
        # Its state was given up; a run that failed leaves none for the next seed.
        self._job = job
        return _results(summary)

    def _prepared(self, argv: tuple[str, ...], seed: int) -> Run:
        """Returns a run that can start, with the last one's programs if it may."""
        if argv != self._argv:
            # Else the programs of all cells stay in memory: 30 MB each.
            if self._argv:
                jax.clear_caches()
            self._argv, self._job, self._draws = argv, None, None
        job, self._job = self._job, None
        if job is not None and self._draws is None:
            self._draws = draws_from_seed(job, seed)
        # Seeds in turn cost one compilation, as seeds in a stack would: on CPU the
        # lanes fill the cores already.
        if job is None or self._draws:
            return make_run(*self._loader.plan(argv, seed))
        return reseeded(job, seed)


def _trained(
    job: Run,
    argv: Sequence[str],
    out: Path,
    report: RunReport,
    asked_to_stop: Callable[[], int],
    started: float,
) -> dict[str, Any]:
    """Trains, writes all files of a run, and returns its summary."""
    command = [*PROGRAM.split(), *argv, "--seed", str(job.config.seed)]
    record_config(job, command, out, [])
    outcome, summary = train_and_record(job, out, report, asked_to_stop)
    if outcome.stopped:
        raise Stopped
    summary["total_seconds"] = round(time.perf_counter() - started, 3)
    records.finish(out, summary, outcome.progress.lines)
    return summary


def clear(folder: Path) -> None:
    """Removes what is left of a run that was cut short.

    Raises:
        BadRequest: a command of `compare --list` is making it.
    """
    if folder.exists() and not is_done(folder):
        with lock.held(folder):
            own_files.remove(folder, own_files.OF_RUN)
        with suppress(OSError):  # it holds something of the user's
            folder.rmdir()


@contextmanager
def unfinished(folder: Path) -> Iterator[Path]:
    """Yields a place for a run's files, which gets the folder's name in the end."""
    # A folder gets its name once all its files exist: no run is half made. Another
    # process may be at the same run, if the link to it was lost.
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
        # It holds something of the user's. The summary comes last: then a run is made.
        for name in records.NAMES:
            (place / name).replace(folder / name)
    records.sync_folder(folder.parent)


def _results(summary: dict[str, Any]) -> str:
    """Returns the results of a run in words; its training loss is in its files."""
    if summary["diverged"]:
        return f"diverged at step {summary['diverged_at']}"
    shown = terminal.measured(summary, summary["validation"])
    loss, *others = [x for x in shown if x != "train loss" and shown[x] is not None]
    # The first says of which data: so a line has room for its run's name.
    names = {loss: loss, **{name: name.partition(" ")[2] for name in others}}
    figures = [f"{names[x]} {terminal.figure(shown[x])}" for x in names]
    return ", ".join([*figures, f"{summary['total_seconds']:.1f} s"])
