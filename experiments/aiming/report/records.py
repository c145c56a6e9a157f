"""Results: findings of a program beside what is modelled and what was counted."""

from collections.abc import Mapping, Sequence
from itertools import groupby
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
        """The bytes that a chip holds at most; None where they are not known."""
        return total_of(self.answer)

    @property
    def fits(self) -> bool | None:
        """Whether they are no more than the chip has; None if that is not known."""
        if self.answer.get("refused"):
            return False if comparison.is_too_large(self.answer) else None
        limit = self.job.target.chip.memory
        return None if self.held is None or limit is None else self.held <= limit


def total_of(answer: Mapping[str, Any]) -> int | None:
    """Returns the bytes of a chip while the program runs; None if they are not known.

    Outputs that take the place of arguments, as the donated state does, count once.
    """
    memory = answer.get("memory")
    if memory is None:
        return answer.get("needed")
    held = memory["arguments"] + memory["outputs"] - memory["aliased"]
    return held + memory["temporary"] + memory["code"]


def by_target(found: Sequence[Result]) -> list[tuple[Target, list[Result]]]:
    """Returns the results of each target, in their order."""
    groups = groupby(found, lambda result: result.job.target)
    return [(target, [*group]) for target, group in groups]


def versions_of(found: Sequence[Result]) -> list[str]:
    """Returns a sentence on the versions of what compiled, or several.

    Programs of --reuse may have been compiled by others: each sentence but one of all
    programs names its own.
    """
    labels: dict[str, list[str]] = {}
    for x in found:
        if versions := x.answer.get("versions"):
            text = ", ".join(f"{name} {version}" for name, version in versions.items())
            labels.setdefault(text, []).append(x.job.variant.label)
    if len(labels) == 1:
        return [f"With {text}." for text in labels]
    return [f"{', '.join(own)} with {text}." for text, own in labels.items()]


def results(
    config: AimConfig, answers: Sequence[Mapping[str, Any]]
) -> tuple[Result, ...]:
    """Returns the results of the first jobs, in their order, as many as answers."""
    found = [
        Result(
            job,
            answer,
            job.variant in config.variants,
            _times(config, job, answer),
            comparison.compared(answer),
        )
        for job, answer in zip(config.jobs, answers, strict=False)
    ]
    return tuple(result._replace(times=_faster(result, found)) for result in found)


def _times(config: AimConfig, job: Job, answer: Mapping[str, Any]) -> tuple[Times, ...]:
    """Returns the modelled times, on the target's own links first."""
    given = answer, job.target, config.mfu, job.config.arguments
    modelled = [
        times.modelled(*given, network=each, step_seconds=config.step_time)
        for each in (None, *config.networks)
    ]
    return tuple(x for x in modelled if x is not None)


def _faster(result: Result, all_results: Sequence[Result]) -> tuple[Times, ...]:
    """Returns the times of a result with their speed-up over sync_sgd."""
    target = result.job.target
    baselines = (x for x in all_results if is_baseline(x.job.variant))
    baseline = next((x for x in baselines if x.job.target == target), None)
    if baseline is None or len(baseline.times) != len(result.times):
        return result.times
    pairs = zip(result.times, baseline.times, strict=True)
    return tuple(x._replace(speed_up=y.mean / x.mean) for x, y in pairs)
