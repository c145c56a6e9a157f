"""Results: findings in a program, with modelled times and the ledger's counts."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from experiments.aiming import times
from experiments.aiming.config import MFU, AimConfig, Job, is_baseline
from experiments.aiming.report import comparison
from experiments.aiming.report.comparison import Comparison
from experiments.aiming.times import Times


class Result(NamedTuple):
    """The findings about a program.

    Attributes:
        job: the program to compile.
        answer: the answer of its process: findings, or why there is no program.
        is_asked: whether the user requested it; others are only for the speed-up.
        times: modelled times on the target's own links, then on each further network;
            () if they are not known.
        comparison: the comparison of ledger and compiler; None without a program.
    """

    job: Job
    answer: Mapping[str, Any]
    is_asked: bool
    times: tuple[Times, ...]
    comparison: Comparison | None

    @property
    def label(self) -> str:
        """Its name in tables."""
        return self.job.variant.label + ("" if self.is_asked else " (for comparison)")

    @property
    def is_done(self) -> bool:
        """Whether the compiler gave a result, even that the run does not fit."""
        is_told = not self.answer.get("refused") or is_too_large(self.answer)
        return "compile_seconds" in self.answer and is_told

    @property
    def held(self) -> int | None:
        """The bytes on a chip while the program runs; None if they are not known.

        Outputs that replace arguments, such as the donated state, count once.
        """
        memory = self.answer.get("memory")
        if memory is None:
            return self.answer.get("needed")
        total = memory["arguments"] + memory["outputs"] - memory["aliased"]
        return total + memory["temporary"] + memory["code"]

    @property
    def fits(self) -> bool | None:
        """Whether these bytes fit on the chip; None if that is not known."""
        if self.answer.get("refused"):
            return False if is_too_large(self.answer) else None
        limit = self.job.target.chip.memory
        return None if self.held is None or limit is None else self.held <= limit


def is_too_large(answer: Mapping[str, Any]) -> bool:
    """Whether the compiler refused a program because memory does not suffice."""
    text = answer.get("refused") or ""
    return "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower()


def outcome(answer: Mapping[str, Any]) -> str:
    """Returns how a compilation ended, in one line."""
    if "error" in answer:
        return f"refused: {answer['error']}"
    if "failed" in answer:
        return f"failed: {answer['failed']}"
    if "timeout" in answer:
        return f"given up after {answer['timeout']:g} s (--timeout)"
    seconds = f"{answer['compile_seconds']:.1f} s"
    if is_too_large(answer):
        return f"does not fit: the compiler refused it after {seconds}"
    return compilers_words(answer) or f"compiled in {seconds}"


def compilers_words(answer: Mapping[str, Any]) -> str:
    """Returns the first line of a compiler's refusal, without its trace; "" if none."""
    lines = [x.strip() for x in (answer.get("refused") or "").splitlines()]
    return f"the compiler: {next(filter(None, lines), 'no reason')}" if lines else ""


def results(
    config: AimConfig, answers: Sequence[Mapping[str, Any]]
) -> tuple[Result, ...]:
    """Returns results in the order of the jobs, one for each answer so far."""
    found = []
    for job, answer in zip(config.jobs, answers, strict=False):
        arguments = answer, job.target, MFU, job.config.arguments
        # On the target's own links first.
        modelled = [
            times.modelled(*arguments, network, config.step_time)
            for network in (None, *config.networks)
        ]
        known = tuple(x for x in modelled if x is not None)
        is_asked = job.variant in config.variants
        compared = comparison.compared(answer)
        found.append(Result(job, answer, is_asked, known, compared))
    baselines = {x.job.target: x.times for x in found if is_baseline(x.job.variant)}
    return tuple(_sped_up(x, baselines.get(x.job.target, ())) for x in found)


def _sped_up(result: Result, baseline: Sequence[Times]) -> Result:
    """Returns a result with its speed-up over the baseline, if that has times."""
    pairs = zip(result.times, baseline, strict=False)
    faster = tuple(x._replace(speed_up=y.mean / x.mean) for x, y in pairs)
    return result._replace(times=faster or result.times)
