"""Training over a real slow link: `python -m benchmarks.slow_link`.

Two processes of one worker each, in two network namespaces that a shaped veth pair
joins, train an MLP of 4.48 MB by several algorithms, in turn. Printed are, for each
rate: steps/s (minimum, median, maximum of the repeats), the bytes that the interface
counted, and the prediction of the network model of `experiments.compare`.

The share of the wire is the bytes of `syncalgos.communication` over the nominal rate:
headers and acknowledgements count as lost. Without privileges the benchmark is skipped.
"""

import argparse
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from benchmarks.measure import reported_by
from benchmarks.network.link import Link

ALGORITHMS = (
    "sync_sgd",
    "bf16",
    "int8",
    "topk_sgd",
    "powersgd",
    "model_averaging",
    "bmuf",
    "diloco",
    "streaming_diloco",
)
TOLERANCE = 0.05  # of the bytes, headers and gloo's own messages taken off
SHARE, SPEEDUP = 0.85, 10  # wanted at 100 Mbit/s
AVERAGING = ("model_averaging", "bmuf", "diloco")

COLUMNS = (
    "Mbit/s",
    "algorithm",
    "steps/s",
    "of the wire",
    "kB a step",
    "by the interface",
    "without overhead",
    "",
    "a step, ms",
    "model, ms",
    "fused",
    "model from probes",
)
MODELS = ("nominal", "nominal, fused", "probed")  # those that the table shows


def measure(
    link: Link, rate: float, repeats: int, algos: Sequence[str]
) -> Iterator[dict]:
    """Yields the records of both ends' training at a rate, as they come."""
    link.shape(rate)
    module = [sys.executable, "-m", "benchmarks.network.slow_link_end"]
    return reported_by(
        [
            [*link.command(end), *module, str(end), str(rate), str(repeats), *algos]
            for end in (0, 1)
        ]
    )


def row(records: Sequence[dict]) -> str:
    """A row of the table, of one algorithm and rate."""

    def middle(name: str) -> float:
        return median(record[name] for record in records)

    def model(name: str) -> str:
        seconds = [record["modelled_seconds"][name] for record in records]
        off = middle("seconds_per_step") / median(seconds)
        return f"{1000 * median(seconds):.4g} (×{off:.2f})"

    rates = [record["steps_per_second"] for record in records]
    ratio = middle("payload_ratio")
    cells = (
        f"{records[0]['rate']:g}",
        f"`{records[0]['algorithm']}`",
        ", ".join(f"{f(rates):.4g}" for f in (min, median, max)),
        f"{middle('share_of_wire'):.3f}",
        f"{middle('bytes_per_step') / 1000:.1f}",
        f"{middle('interface_ratio'):.3f}",
        f"{ratio:.3f}",
        "ok" if abs(ratio - 1) <= TOLERANCE else "NOT ok",
        f"{1000 * middle('seconds_per_step'):.4g}",
        *map(model, MODELS),
    )
    return f"| {' | '.join(cells)} |"


def verdicts(records: Sequence[dict]) -> Iterator[str]:
    """Whether the targets at 100 Mbit/s are met, as far as they were measured."""
    found: dict[str, list[dict]] = {}
    for record in records:
        if record["rate"] == 100:
            found.setdefault(record["algorithm"], []).append(record)
    if "sync_sgd" not in found:
        return
    every_step = found["sync_sgd"]
    share = median(record["share_of_wire"] for record in every_step)
    yield verdict(f"sync_sgd: {share:.3f} of the wire", share >= SHARE, SHARE)
    for algo in AVERAGING:
        pairs = zip(found.get(algo, ()), every_step, strict=False)
        ratios = [a["steps_per_second"] / b["steps_per_second"] for a, b in pairs]
        if ratios:
            text = f"{algo}: {median(ratios):.1f} times sync_sgd's steps/s"
            yield verdict(text, median(ratios) >= SPEEDUP, SPEEDUP)


def verdict(text: str, holds: bool, wanted: float) -> str:
    """A line that compares a measurement with the target."""
    return f"100 Mbit/s, {text}, wanted {wanted}: {'ok' if holds else 'NOT ok'}"


def run(link: Link, arguments: argparse.Namespace) -> None:
    """Measures and prints everything."""
    everything = []
    for rate in arguments.rates:
        found = measure(link, rate, arguments.repeats, arguments.algos)
        records = [kept(record, arguments.out) for record in found]
        show(rate, records, arguments.algos)
        everything += records
    print()
    print(*verdicts(everything), sep="\n")


def kept(record: dict, out: Path | None) -> dict:
    """Adds a record to a file of JSON lines, if there is one, as soon as it is made."""
    if out:
        with out.open("a") as file:
            file.write(json.dumps(record) + "\n")
    return record


def show(rate: float, records: Sequence[dict], algos: Sequence[str]) -> None:
    """Prints the link at a rate, and the table of its records."""
    first = records[0]
    print(
        f"\n{rate:g} Mbit/s: TCP carries {first['goodput'] * 8e-6:.4g} Mbit/s, "
        f"{first['latency'] * 1e6:.3g} µs one way; a hop of gloo's all-reduce "
        f"takes {first['hop'] * 1e6:.3g} µs\n"
    )
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for algo in algos:
        print(row([r for r in records if r["algorithm"] == algo]), flush=True)


def names(text: str) -> list[str]:
    """The algorithms of --algos."""
    chosen = text.split(",")
    for name in chosen:
        if name not in ALGORITHMS:
            raise argparse.ArgumentTypeError(
                f"unknown algorithm {name!r} (there are: {', '.join(ALGORITHMS)})"
            )
    return chosen


def rates(text: str) -> list[float]:
    """The rates of --rates, in Mbit/s."""
    chosen = [float(rate) for rate in text.split(",")]
    if min(chosen) <= 0:
        raise argparse.ArgumentTypeError(f"rates must be above 0, got {text}")
    return chosen


def count(text: str) -> int:
    """A number of repeats."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def main() -> int:
    parser = argparse.ArgumentParser(description="Training over a real slow link.")
    parser.add_argument("--rates", type=rates, default="1000,100,10", help="Mbit/s")
    parser.add_argument("--algos", type=names, default=",".join(ALGORITHMS))
    parser.add_argument("--repeats", type=count, default=3)
    parser.add_argument("--out", type=Path, help="JSON lines, a line a repeat")
    arguments = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    with ExitStack() as stack:
        try:
            link = stack.enter_context(Link())
        except OSError as error:
            print(f"skipped: {error}")
            return 0
        run(link, arguments)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
