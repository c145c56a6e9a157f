"""Results: findings of a program beside what is modelled and what was counted."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from experiments.aiming import times
from experiments.aiming.config import AimConfig, Job, is_baseline
from experiments.aiming.report import comparison
from experiments.aiming.report.comparison import Comparison
from experiments.aiming.targets import Target
from experiments.aiming.times import Times


class Result(NamedTuple):
    """The findings of a program.

    Attributes:
        job: what was to be compiled.
        answer: of its process: what was read off the program, or why there is none.
        is_asked: whether the user has asked for it, not only for the speed-up.
        times: modelled on the target's own links, then on each further network; () if
            they are not known.
        comparison: of the ledger and the compiler; None where there is no program.
    """

    job: Job
    answer: Mapping[str, Any]
    is_asked: bool
    times: tuple[Times, ...]
    comparison: Comparison | None

    @property
    def is_done(self) -> bool:
        """Whether the compiler had its say, be it that the run does not fit."""
        refused = self.answer.get("refused")
        is_told = not refused or comparison.is_too_large(self.answer)
        return "compile_seconds" in self.answer and is_told

    @property
    def held(self) -> int | None:
        """The bytes of a chip while the program runs; None if they are not known.

        Outputs that take the place of arguments, as the donated state does, count once.
        """
        memory = self.answer.get("memory")
        if memory is None:
            return self.answer.get("needed")
        total = memory["arguments"] + memory["outputs"] - memory["aliased"]
        return total + memory["temporary"] + memory["code"]

    @property
    def fits(self) -> bool | None:
        """Whether they are no more than the chip has; None if that is not known."""
        if self.answer.get("refused"):
            return False if comparison.is_too_large(self.answer) else None
        limit = self.job.target.chip.memory
        return None if self.held is None or limit is None else self.held <= limit


def results(
    config: AimConfig, answers: Sequence[Mapping[str, Any]]
) -> tuple[Result, ...]:
    """Returns the results of the first jobs, in their order, as many as answers."""
    unrelated = []
    for job, answer in zip(config.jobs, answers, strict=False):
        arguments = answer, job.target, config.mfu, job.config.arguments
        # On the target's own links first.
        modelled = [
            times.modelled(*arguments, network=network, step_seconds=config.step_time)
            for network in (None, *config.networks)
        ]
        unrelated.append(
            Result(
                job,
                answer,
                job.variant in config.variants,
                tuple(x for x in modelled if x is not None),
                comparison.compared(answer),
            )
        )
    baselines = {x.job.target: x for x in unrelated if is_baseline(x.job.variant)}
    return tuple(x._replace(times=_faster(x, baselines)) for x in unrelated)


def _faster(result: Result, baselines: Mapping[Target, Result]) -> tuple[Times, ...]:
    """Returns the times of a result with their speed-up over sync_sgd."""
    baseline = baselines.get(result.job.target)
    if baseline is None or len(baseline.times) != len(result.times):
        return result.times
    pairs = zip(result.times, baseline.times, strict=True)
    return tuple(x._replace(speed_up=y.mean / x.mean) for x, y in pairs)
