"""The plan of a study's missing runs: which of them a job makes next."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from experiments.cli import terminal
from experiments.study.grid import RunSet, damage

Choose = Callable[[RunSet], RunSet | None]
"""A run set whose trials have ended -> the same with the values chosen, if any ran."""


class Run(NamedTuple):
    """A run that is to be made.

    Attributes:
        name: of its cell and its seed, for the user.
        argv: flags of experiments.run, without --seed.
        seed: of the run.
        folder: of its files.
    """

    name: str
    argv: tuple[str, ...]
    seed: int
    folder: Path


class Failure(NamedTuple):
    """A run that could not be made.

    Attributes:
        run: the run.
        line: why, in one line.
        is_request: whether its flags were refused.
    """

    run: Run
    line: str
    is_request: bool = False


@dataclass(eq=False)
class Share:
    """The runs of a cell that one job makes, one after the other.

    A cell is one variant at one point with one set of values: its runs differ in their
    seed alone, and share a program.

    Attributes:
        made: the index of the run set to report.
        waiting: the runs that are yet to be started.
        seconds: of its first run, whose program was compiled, and of the last one after
            it; None while they are not known.
    """

    made: int
    waiting: list[Run]
    seconds: tuple[float | None, float | None] = (None, None)

    def timed(self, seconds: float) -> None:
        """Notes how long a run took."""
        first, _ = self.seconds
        self.seconds = (seconds, None) if first is None else (first, seconds)


@dataclass
class Plan:
    """The missing runs, handed out to jobs, and what has become of them.

    Final runs wait for the trials of their own variant alone.

    Attributes:
        planned: the run sets to report, with their trials.
        choose: chooses the values of one whose trials are done.
        total: the number of all runs.
        done: the number of those that exist.
        failures: runs that could not be made.
        found: the run sets to report, with the values chosen; None while trials run.
    """

    planned: Sequence[RunSet]
    choose: Choose
    total: int = 0
    done: int = 0
    failures: list[Failure] = field(default_factory=list)
    found: list[RunSet | None] = field(default_factory=list)
    _fresh: list[Share] = field(default_factory=list)
    _begun: list[Share] = field(default_factory=list)
    _left: dict[int, int] = field(default_factory=dict)  # trials, by run set
    _seconds: tuple[float | None, float | None] = (None, None)  # of the latest share

    def __post_init__(self):
        self.found = [None] * len(self.planned)
        # All trials first: the final runs then fill the gaps at the end.
        for index, made in enumerate(self.planned):
            trials = [share for trial in made.trials for share in _shares(index, trial)]
            self._fresh += trials
            self._left[index] = sum(len(share.waiting) for share in trials)
        for index, made in enumerate(self.planned):
            self.total += sum(len(x.seeds) for x in (made, *made.trials))
            if not self._left[index]:
                self._fresh += self._finals(index)
        waiting = sum(len(share.waiting) for share in self._fresh)
        unknown = (len(x.seeds) for i, x in enumerate(self.planned) if self._left[i])
        self.done = self.total - waiting - sum(unknown)

    def take(self) -> Share | None:
        """Returns what a free job makes next; None while there is nothing."""
        share = self._fresh.pop(0) if self._fresh else self._cut()
        if share is not None:
            self._begun.append(share)
        return share

    def _cut(self) -> Share | None:
        """Cuts the longest share that is under way by its seeds, if it is worth it."""
        longest = max(self._begun, key=lambda x: len(x.waiting), default=None)
        if longest is None or not longest.waiting:
            return None
        # The other job compiles the program once more: it would end later than the
        # first one, where runs are short.
        first, later = longest.seconds if longest.seconds[1] else self._seconds
        if first and later and len(longest.waiting) * later < first:
            return None
        half = len(longest.waiting) // 2
        share = Share(longest.made, longest.waiting[half:])
        del longest.waiting[half:]
        return share

    def ended(
        self, share: Share, seconds: float = 0.0, failure: Failure | None = None
    ) -> None:
        """Counts a run of a share that was made, in so many seconds, or that failed."""
        if failure is None:
            self.done += 1
            share.timed(seconds)
            if share.seconds[1]:
                self._seconds = share.seconds
        else:
            self.failures.append(failure)
        if not self._left[share.made]:
            return
        self._left[share.made] -= 1
        if not self._left[share.made]:
            # First of all that wait: their variant has been under way the longest.
            self._fresh[:0] = self._finals(share.made)

    def give_back(self, share: Share, run: Run) -> None:
        """Takes back a run that its job did not end, and the rest of its share."""
        share.waiting.insert(0, run)
        self.release(share)

    def release(self, share: Share) -> None:
        """Takes a share back from its job; what waits is for another one."""
        self._begun.remove(share)
        if share.waiting:
            # Another job compiles its program anew.
            self._fresh.insert(0, Share(share.made, share.waiting))

    @property
    def is_over(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return not self._fresh and not self._begun

    def waiting(self) -> Iterator[Run]:
        """Yields the missing runs that are known so far."""
        for share in self._fresh:
            yield from share.waiting

    def _finals(self, index: int) -> list[Share]:
        """Chooses the values of a run set, and returns its missing runs."""
        made = self.planned[index]
        found = self.choose(made)
        if found is None:
            run = next(_runs(made))
            line = "none of its trials could be made, so its values are unknown"
            self.failures.append(Failure(run, line, is_request=True))
            return []
        self.found[index] = found
        return _shares(index, found)


def _shares(index: int, runs: RunSet) -> list[Share]:
    """Returns the missing runs of a run set as a share; none if none is missing."""
    missing = [*_runs(runs)]
    return [Share(index, missing)] if missing else []


def _runs(runs: RunSet) -> Iterator[Run]:
    """Yields the missing runs of a run set."""
    trial = runs.trial if runs.share is not None else ""
    name = " ".join(x for x in (runs.variant.label, runs.point, trial) if x)
    for seed in runs.missing():
        if why := damage(runs.run(seed)):
            terminal.say(f"{why}: the run is made anew")
        yield Run(f"{name}, seed {seed}", tuple(runs.argv), seed, runs.run(seed))
