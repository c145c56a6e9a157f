"""The plan of a study's missing runs, which decides what a job makes next."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.cli import terminal
from experiments.study.runs import RunSet, damage
from experiments.training.config import RunConfig


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


class Missing(NamedTuple):
    """A missing run.

    Attributes:
        number: the index of the run set to report. Its runs and trials differ only in
            numbers and seeds, and mostly share their programs.
        runs: the run set that the run belongs to.
        seed: the seed of the run.
    """

    number: int
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


class Plan:
    """The missing runs, handed out to jobs, and their outcomes.

    Final runs wait only for the trials of their own variant.

    Args:
        planned: the run sets to report, with their trials.
        choose: function that chooses the values of a run set whose trials are done.

    Attributes:
        total: the number of all runs.
        done: the number of runs that exist.
        failures: the runs that failed, and why.
        found: the run sets to report, with the chosen values; None while trials run.
        waiting: the missing runs that are known so far and that no job makes.
    """

    def __init__(
        self, planned: Sequence[RunSet], choose: Callable[[RunSet], RunSet | None]
    ):
        self.planned, self._choose = planned, choose
        self.total, self.done = 0, 0
        self.failures = list[tuple[Missing, Refused]]()
        self.found: list[RunSet | None] = [None] * len(planned)
        self.waiting = list[Missing]()
        self._taken = Counter[int]()  # runs in progress, by number
        self._trials = Counter[int]()  # trials left, by number
        # All trials first: the final runs then fill the gaps at the end.
        for number, runs in enumerate(planned):
            self.total += sum(len(x.seeds) for x in (runs, *runs.trials))
            self._trials[number] = self._add(number, runs.trials, len(self.waiting))
        for number in range(len(planned)):
            if not self._trials[number]:
                self._add_finals(number, len(self.waiting))

    @property
    def is_over(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return not self.waiting and not self._taken.total()

    def take(self, last: int | None = None) -> Missing | None:
        """Returns the run that a free job makes next; None while there is none.

        Args:
            last: the number of the job's last run.
        """
        if not self.waiting:
            return None
        # Programs are compiled by as few jobs as possible: a job stays with its number,
        # or begins one that no other job has.
        run = min(self.waiting, key=lambda x: (x.number != last, self._taken[x.number]))
        self.waiting.remove(run)
        self._taken[run.number] += 1
        return run

    def ended(self, run: Missing, outcome: Made | Refused) -> None:
        """Counts a run, which was made or failed."""
        self._taken[run.number] -= 1
        if isinstance(outcome, Made):
            self.done += 1
        else:
            self.failures.append((run, outcome))
        self._trials[run.number] -= 1
        if self._trials[run.number] == 0:  # final runs count on, below it
            # First of all that wait: their variant has been under way the longest.
            self._add_finals(run.number, 0)

    def give_back(self, run: Missing) -> None:
        """Takes back a run that a job has not made."""
        self._taken[run.number] -= 1
        self.waiting.insert(0, run)

    def _add_finals(self, number: int, place: int) -> None:
        """Chooses the values of a run set, and adds its runs."""
        planned = self.planned[number]
        runs = self.found[number] = self._choose(planned)
        if runs is not None:
            self._add(number, [runs], place)
            return
        why = Refused("all of its trials failed, so no values can be chosen", True)
        self.failures.append((Missing(number, planned, planned.seeds[0]), why))

    def _add(self, number: int, sets: Sequence[RunSet], place: int) -> int:
        """Adds the missing runs of some run sets; returns how many there are."""
        missing = [Missing(number, runs, x) for runs in sets for x in runs.missing()]
        for run in missing:
            if why := damage(run.folder):
                terminal.say(f"{why}: the run is repeated")
        self.done += sum(len(runs.seeds) for runs in sets) - len(missing)
        self.waiting[place:place] = missing
        return len(missing)
