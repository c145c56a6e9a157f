"""Measures how often intervals of few paired differences hold the true mean.

    python -m benchmarks.harness.intervals [--draws 20000]

prints a table. For differences of several distributions, it has the share of draws
whose 95 % interval holds the mean, for Student's interval and for the percentile
bootstrap widened for few pairs (Hesterberg, "What teachers should know about the
bootstrap", The American Statistician 2015), and the ratio of the bootstrap's width to
Student's.
"""

import argparse
import math
from typing import NamedTuple

import numpy as np
from scipy.stats import norm, t

RESAMPLES = 4000
CHUNK = 200  # draws at a time: their resamples take some hundred MB
PAIRS = (5, 10, 20)

# All have mean 0. Differences of accuracies are skewed if one run in ten ends far below
# the others, and about normal otherwise.
DISTRIBUTIONS = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "uniform": lambda rng, shape: rng.uniform(-1, 1, shape),
    "exponential": lambda rng, shape: rng.exponential(size=shape) - 1,
    "log-normal": lambda rng, shape: rng.lognormal(size=shape) - math.exp(0.5),
    "one run in ten is lost": lambda rng, shape: (
        rng.normal(size=shape) - 5 * (rng.random(shape) < 0.1) + 0.5
    ),
}


class Intervals(NamedTuple):
    """The lower and upper ends of intervals, (draws,) each."""

    low: np.ndarray
    high: np.ndarray


def student(samples: np.ndarray) -> Intervals:
    """Returns the ends of Student's interval of each row, (draws, pairs)."""
    pairs = samples.shape[1]
    half = t.ppf(0.975, pairs - 1) * samples.std(axis=1, ddof=1) / math.sqrt(pairs)
    return Intervals(samples.mean(axis=1) - half, samples.mean(axis=1) + half)


def widened_bootstrap(samples: np.ndarray, rng: np.random.Generator) -> Intervals:
    """Returns the ends of the widened bootstrap interval of each row."""
    pairs = samples.shape[1]
    tail = norm.cdf(-math.sqrt(pairs / (pairs - 1)) * t.ppf(0.975, pairs - 1))
    low = []
    high = []
    for rows in np.array_split(samples, max(1, len(samples) // CHUNK)):
        picks = rng.integers(pairs, size=(len(rows), RESAMPLES, pairs))
        resamples = np.take_along_axis(rows[:, None], picks, axis=2)
        ends = np.quantile(resamples.mean(axis=2), [tail, 1 - tail], axis=1)
        low.append(ends[0])
        high.append(ends[1])
    return Intervals(np.concatenate(low), np.concatenate(high))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=20_000)
    draws = parser.parse_args().draws
    print("| differences | pairs | Student | bootstrap | its width by Student's |")
    print("|---|---|---|---|---|")
    for name, draw_samples in DISTRIBUTIONS.items():
        for pairs in PAIRS:
            rng = np.random.default_rng(pairs)
            samples = draw_samples(rng, (draws, pairs))
            intervals = [student(samples), widened_bootstrap(samples, rng)]
            shares = [100 * np.mean((x.low <= 0) & (x.high >= 0)) for x in intervals]
            widths = [np.median(x.high - x.low) for x in intervals]
            print(
                f"| {name} | {pairs} | {shares[0]:.1f} % | {shares[1]:.1f} % | "
                f"{widths[1] / widths[0]:.2f} |"
            )
    error = 100 * math.sqrt(0.95 * 0.05 / draws)
    print(f"\n{draws:,} draws: standard error {error:.2f} points")


if __name__ == "__main__":
    main()
