"""Does DiLoCo's gap to synchronous training close with the number of rounds?

    python -m benchmarks.harness.rounds

prints the verdicts of docs/studies/diloco-rounds from its records; without records, the
power of the planned test by simulation, at the spread that other records show. The gap
of a run is its loss over that of synchronous training with the same optimizer, number
of rounds and seed, minus 1. Its slope is that of a line over the logarithm of the
rounds to base 2: by how much the gap changes where the rounds double.

The test permutes the numbers of rounds within each seed. Where the gap does not depend
on them, all such permutations are equally probable. A p-value is the share of the
permutations whose slope is at least as steep, and is corrected for the three algorithms
by Holm.
"""

import argparse
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.study.statistics import correct_by_holm

FOLDER = Path("docs/studies/diloco-rounds")
WORKERS_RECORD = Path("docs/studies/diloco-workers/finals.jsonl")
SYNCHRONOUS_RECORD = Path("docs/studies/diloco-period/finals.jsonl")
PERIOD = 16
# The synchronous row that each algorithm is compared with.
SYNCHRONOUS = {
    "model_averaging": "sync_sgd",
    "diloco": "sync_sgd",
    "muloco": "sync_muon",
}
SEEDS_BY_ROUNDS = {40: 5, 160: 5, 640: 3}
LEVEL = 0.05
# The least slope that is resolved: the chance of tuning explains smaller ones.
LEAST_SLOPE = 0.004
SIMULATIONS = 400

Gaps = Mapping[int, Mapping[int, float]]
"""Relative gaps by seed, then by rounds."""


class Trend(NamedTuple):
    """How a gap changes with the rounds.

    Attributes:
        slope: change of the gap where the rounds double.
        p: p-value of no dependence, two-sided.
    """

    slope: float
    p: float


def find_trend(gaps: Gaps) -> Trend:
    """Returns the slope of relative gaps, and its p-value by permutations."""
    logarithms: list[np.ndarray] = []
    permuted_gaps: list[np.ndarray] = []  # of each seed, (permutations, rounds)
    for gaps_by_rounds in gaps.values():
        rounds = sorted(gaps_by_rounds)
        logarithms.append(np.log2(rounds))
        values = [gaps_by_rounds[count] for count in rounds]
        permuted_gaps.append(np.array([*itertools.permutations(values)]))
    x = np.concatenate(logarithms)
    weights = (x - x.mean()) / ((x - x.mean()) ** 2).sum()
    # The slope is a sum over seeds, so permutations of each seed add up.
    slopes = np.zeros(1)
    start = 0
    for values in permuted_gaps:
        stop = start + values.shape[1]
        slopes = (slopes[:, None] + values @ weights[start:stop]).ravel()
        start = stop
    slope = slopes[0]  # the first permutation leaves all in place
    is_as_steep = np.abs(slopes) >= abs(slope) * (1 - 1e-9)
    return Trend(float(slope), float(is_as_steep.mean()))


def describe(trend: Trend, corrected_p: float) -> str:
    """Returns the verdict: the gap closes, grows, or that is not resolved."""
    if corrected_p >= LEVEL or abs(trend.slope) < LEAST_SLOPE:
        return "not resolved"
    return "the gap closes" if trend.slope < 0 else "the gap grows"


def read_gaps(lines: Iterable[Mapping[str, Any]], label: str) -> Gaps:
    """Returns the relative gaps of an algorithm from the lines of records."""
    losses: dict[tuple[str, int, int], float] = {}
    for line in lines:
        if line["reported"] and not line["diverged"]:
            rounds = line["steps"] // PERIOD
            losses[line["label"], rounds, line["seed"]] = line["test_loss"]
    gaps: dict[int, dict[int, float]] = {}
    for (row_label, rounds, seed), loss in losses.items():
        base = losses.get((SYNCHRONOUS[label], rounds, seed))
        if row_label == label and base is not None:
            gaps.setdefault(seed, {})[rounds] = loss / base - 1
    return gaps


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Returns the lines of a folder's records, each with its number of steps."""
    lines: list[dict[str, Any]] = []
    for path in sorted(folder.glob("finals*.jsonl")):
        for line in _read_lines(path):
            # Without a sweep, all runs of a file have one length.
            line.setdefault("steps", 640 * PERIOD)
            lines.append(line)
    return lines


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text("utf-8").splitlines()]


class Spread(NamedTuple):
    """The spread of relative gaps that is assumed.

    Attributes:
        seeds: the deviation over seeds, with equal batches for both rows.
        tuning: the deviation of a row at one number of rounds that all its seeds share,
            because their rate was chosen by few tuning seeds.
    """

    seeds: float
    tuning: float


def measure_spread() -> Spread:
    """Returns the spread of DiLoCo's relative gap in records of a similar setting.

    That over seeds is that of 8 workers, whose 40 rounds have a period of 30. That of
    tuning is half of the relative difference between the two best rates.
    """
    diloco: dict[int, float] = {}
    trials: dict[float, list[float]] = {}
    for line in _read_lines(WORKERS_RECORD):
        if line["label"] == "Nesterov" and line["workers"] == 8:
            if line["reported"]:
                diloco[line["seed"]] = line["test_loss"]
            else:
                trials.setdefault(line["lr"], []).append(line["test_loss"])
    synchronous: dict[int, float] = {}
    for line in _read_lines(SYNCHRONOUS_RECORD):
        if line["label"] == "data-parallel" and line["reported"]:
            synchronous[line["seed"]] = line["test_loss"]
    gaps = [diloco[seed] / synchronous[seed] - 1 for seed in synchronous]
    best, second, *_ = sorted(np.mean(losses) for losses in trials.values())
    return Spread(float(np.std(gaps, ddof=1)), float(second / best - 1) / 2)


def simulate_power(slope: float, spread: Spread, seed: int = 0) -> float:
    """Returns how often a true slope is resolved with the right sign.

    Without a slope, it is how often any is resolved. One of three algorithms has it,
    and its p-value must be below a third of the level, the smallest of three by Holm.
    """
    draws = np.random.default_rng(seed)
    num_resolved = 0
    for _ in range(SIMULATIONS):
        gaps: dict[int, dict[int, float]] = {}
        for rounds, num_seeds in SEEDS_BY_ROUNDS.items():
            shared = slope * math.log2(rounds / 40) + spread.tuning * draws.normal()
            for number in range(num_seeds):
                gap = shared + spread.seeds * draws.normal()
                gaps.setdefault(number, {})[rounds] = gap
        trend = find_trend(gaps)
        has_sign = slope == 0 or trend.slope * slope > 0
        corrected_p = min(1.0, len(SYNCHRONOUS) * trend.p)
        is_resolved = describe(trend, corrected_p) != "not resolved"
        num_resolved += is_resolved and has_sign
    return num_resolved / SIMULATIONS


def make_power_table(slopes: Sequence[float]) -> list[str]:
    """Returns a Markdown table of the power, with and without the chance of tuning."""
    spread = measure_spread()
    lines = ["| slope, points for each doubling | power | with the chance of tuning |"]
    lines.append("|--:|--:|--:|")
    for slope in slopes:
        alone = simulate_power(slope, spread._replace(tuning=0.0))
        with_tuning = simulate_power(slope, spread)
        lines.append(f"| {100 * slope:.2g} | {alone:.0%} | {with_tuning:.0%} |")
    seeds = f"{100 * spread.seeds:.2f} points over seeds"
    lines.append(f"\nspread: {seeds}, {100 * spread.tuning:.2f} by tuning")
    return lines


def main() -> None:
    """Prints the verdicts, or the power of the planned test."""
    parser = argparse.ArgumentParser(description="DiLoCo's gap by the rounds.")
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER)
    lines = read_records(parser.parse_args().folder)
    if not lines:
        print("\n".join(make_power_table([0.0, -0.002, -0.005, -0.01, -0.013])))
        return
    trends = {label: find_trend(read_gaps(lines, label)) for label in SYNCHRONOUS}
    corrected = correct_by_holm({label: trend.p for label, trend in trends.items()})
    for label, trend in trends.items():
        verdict = describe(trend, corrected[label])
        slope = f"{100 * trend.slope:+.2f} points for each doubling"
        print(f"{label}: {slope}, p = {corrected[label]:.3g}: {verdict}")


if __name__ == "__main__":
    main()
