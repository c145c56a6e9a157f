"""The plan of a study's missing runs, which decides what a job makes next."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from experiments.cli import terminal
from experiments.study.grid import RunSet, damage
from experiments.study.running.maker import Made, Refused
from experiments.training.config import RunConfig

Choose = Callable[[RunSet], RunSet | None]
"""Maps a run set whose trials have ended to the runs with the chosen values, if any."""


class Failure(NamedTuple):
    """A run that failed.

    Attributes:
        runs: the run set that it belongs to.
        seed: the seed of the run.
        line: the reason, in one line.
        is_request: whether its flags were refused.
    """

    runs: RunSet
    seed: int
    line: str
    is_request: bool = False


class Missing(NamedTuple):
    """A missing run."""

    runs: RunSet
    seed: int

    @property
    def name(self) -> str:
        """The name of the run, for the user."""
        runs = self.runs
        trial = runs.trial if runs.is_trial else ""
        cell = " ".join(x for x in (runs.variant.label, runs.point, trial) if x)
        return f"{cell}, seed {self.seed}"

    @property
    def folder(self) -> Path:
        """Its folder."""
        return self.runs.run(self.seed)

    @property
    def config(self) -> RunConfig:
        """Its config."""
        return self.runs.config_of(self.seed)

    @property
    def argv(self) -> list[str]:
        """Its flags of experiments.run."""
        return [*self.runs.argv, "--seed", str(self.seed)]


@dataclass(eq=False)
class Share:
    """The runs that one job makes, one after the other.

    They belong to one variant at one point, and are all its trials or the runs to
    report. They differ only in numbers and seeds, and mostly share their programs.

    Attributes:
        number: the index of the run set to report.
        runs: the runs that have not ended; the first one is in progress.
    """

    number: int
    runs: list[Missing]


@dataclass
class Plan:
    """The missing runs, handed out to jobs, and their outcomes.

    Final runs wait only for the trials of their own variant.

    Attributes:
        planned: the run sets to report, with their trials.
        choose: function that chooses the values of a run set whose trials are done.
        total: the number of all runs.
        done: the number of runs that exist.
        failures: the runs that failed.
        found: the run sets to report, with the chosen values; None while trials run.
    """

    planned: Sequence[RunSet]
    choose: Choose
    total: int = 0
    done: int = 0
    failures: list[Failure] = field(default_factory=list)
    found: list[RunSet | None] = field(default_factory=list)
    _waiting: list[Share] = field(default_factory=list)
    _taken: int = 0  # number of runs that jobs hold and that have not ended
    _trials: Counter[int] = field(default_factory=Counter)  # trials left, by run set

    def __post_init__(self):
        self.found = [None] * len(self.planned)
        # All trials first: the final runs then fill the gaps at the end.
        for number, runs in enumerate(self.planned):
            self.total += sum(len(x.seeds) for x in (runs, *runs.trials))
            self._trials[number] = self._add(number, runs.trials, len(self._waiting))
        for number in range(len(self.planned)):
            if not self._trials[number]:
                self._add_finals(number, len(self._waiting))

    @property
    def is_over(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return not self._waiting and not self._taken

    def waiting(self) -> list[Missing]:
        """Returns the missing runs that are known so far and that no job holds."""
        return [run for share in self._waiting for run in share.runs]

    def take(self, jobs: int = 1) -> Share | None:
        """Returns the share that a free job makes next; None while there is none.

        Args:
            jobs: the number of jobs, including busy ones.
        """
        if not self._waiting:
            return None
        # A job's part of all waiting runs: the last shares are small, so that all jobs
        # end at about the same time.
        most = math.ceil(len(self.waiting()) / jobs)
        share = self._waiting.pop(0)
        if rest := share.runs[most:]:
            self._waiting.insert(0, replace(share, runs=rest))
            del share.runs[most:]
        self._taken += len(share.runs)
        return share

    def ended(self, share: Share, outcome: Made | Refused) -> None:
        """Counts the first run of a share, which was made or failed."""
        run = share.runs.pop(0)
        self._taken -= 1
        match outcome:
            case Made():
                self.done += 1
            case Refused(line, is_request):
                self.failures.append(Failure(*run, line, is_request))
        self._trials[share.number] -= 1
        if self._trials[share.number] == 0:  # final runs count on, below it
            # First of all that wait: their variant has been under way the longest.
            self._add_finals(share.number, 0)

    def give_back(self, share: Share) -> None:
        """Takes back the runs of a share that a job has not made."""
        self._taken -= len(share.runs)
        if share.runs:
            self._waiting.insert(0, share)

    def _add_finals(self, number: int, place: int) -> None:
        """Chooses the values of a run set, and adds its runs."""
        planned = self.planned[number]
        runs = self.found[number] = self.choose(planned)
        if runs is not None:
            self._add(number, [runs], place)
            return
        line = "all of its trials failed, so no values can be chosen"
        self.failures.append(Failure(planned, planned.seeds[0], line, is_request=True))

    def _add(self, number: int, sets: Sequence[RunSet], place: int) -> int:
        """Adds the missing runs of some run sets as a share; returns their number."""
        missing = [Missing(runs, seed) for runs in sets for seed in runs.missing()]
        for run in missing:
            if why := damage(run.folder):
                terminal.say(f"{why}: the run is repeated")
        self.done += sum(len(runs.seeds) for runs in sets) - len(missing)
        if missing:
            self._waiting.insert(place, Share(number, missing))
        return len(missing)
