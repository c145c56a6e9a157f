"""Training over a link of a known rate and latency: `python -m benchmarks.slow_link`.

Processes of `experiments.run`, with one worker each, train an MLP in network namespaces
(`benchmarks.network.link`). Each algorithm is one run, during which the link changes:
first it has no limit, then each rate and latency in turn. So a row of metrics.jsonl has
the time of some local steps on one link.

The time of communication is that of a step minus that of as many processes that train
at the same time, but alone, and send nothing. It is compared with the time model of
`experiments.compare`, for the bytes and calls of the run's summary and the metrics that
a dispatch sends. Without privileges the benchmark is skipped.

`--records FILE` prints the table of records that `--out FILE` saved, and measures
nothing.
"""

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from benchmarks.measure import print_record, table_of_records
from benchmarks.network.link import FIRST_ADDRESS, ROOT, NetworkLink
from experiments.command import stopping, terminal
from experiments.tasks.classify import fields, make_labelled_data, perceptron
from experiments.tasks.task import Data, Task
from experiments.training import sends
from syncalgos.network import cost, modelled_seconds, parse

RATES = (1000.0, 100.0, 10.0)  # Mbit/s
LATENCIES = (1.0, 20.0)  # ms
PERIOD = 4


class LinkMethod(NamedTuple):
    """An algorithm's flags, and the local steps in a row of metrics.jsonl.

    The rows of all have 4 syncs, so that sends once per dispatch have the same weight.
    """

    flags: str
    steps: int = 4


METHODS = {
    "sync_sgd": LinkMethod("--algo sync_sgd"),
    "diloco": LinkMethod(f"--algo diloco --period {PERIOD}", 4 * PERIOD),
    "bmuf": LinkMethod(f"--algo bmuf --period {PERIOD}", 4 * PERIOD),
    "topk_sgd": LinkMethod("--algo topk_sgd"),
    "gossip": LinkMethod("--algo gossip"),
    "noloco": LinkMethod(f"--algo noloco --period {PERIOD}", 4 * PERIOD),
    "streaming_diloco, int4": LinkMethod(
        f"--algo streaming_diloco --period {PERIOD} --fragments 2 --cut bytes "
        "--reduce int4",
        2 * PERIOD,
    ),
}
PROGRAM = (sys.executable, "-m", "experiments.run")
COMMON = "--task benchmarks.slow_link:wide_mlp --steps 1000000"
BATCH = 2  # of each worker
ALONE = f"--workers 1 --batch-size {BATCH}"
METRICS = {"all_reduce": (0.0, 1)}  # the additional send of a dispatch, which is a row
REPEATS = 3  # minimum number of rows
SECONDS = 1.0  # minimum seconds of training in them
PATIENCE = 900  # seconds to wait for a row


def wide_mlp(hidden: int = 640) -> Task:
    """Returns random images for an MLP of 795 params (3 kB) for each hidden unit."""
    return Task(
        **fields(perceptron(784, hidden, 10)),
        load=_load,
        batch_size=64,
        steps=16,
        lr={"": 1e-3},
        dispatch_steps=4 * PERIOD,
    )


def _load() -> Data:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 784)).astype(np.float32)
    training = {"x": x, "y": rng.integers(0, 10, 64, np.int32)}
    return make_labelled_data(
        training, {name: rows[:4] for name, rows in training.items()}
    )


def measure_link(
    link: NetworkLink,
    name: str,
    links: Sequence[tuple[float, float]],
    hidden: int = 640,
) -> Iterator[dict[str, Any]]:
    """Trains with a method; yields a record without a limit, then for each link."""
    method = METHODS[name]
    hosts = link.hosts
    link.shape(None, 0.0)
    size = f"--hidden {hidden}"
    with LinkRuns(link, method, [f"{size} {ALONE}"] * hosts) as runs:
        alone_seconds = runs.rows()
        runs.end()
    common = (
        f"{size} --workers {hosts} --batch-size {hosts * BATCH} "
        f"--num-processes {hosts} --coordinator {FIRST_ADDRESS}:5701"
    )
    host_flags = [f"{common} --process-id {host}" for host in range(hosts)]
    records = []
    with LinkRuns(link, method, host_flags) as runs:
        for rate, latency in [(None, 0.0), *links]:
            link.shape(rate, latency / 1000)
            records.append(
                {
                    "benchmark": "slow_link",
                    "algorithm": name,
                    "flags": method.flags,
                    "hosts": hosts,
                    "hidden": hidden,
                    "rate": rate,
                    "latency": latency,
                    "steps": method.steps,
                    "seconds": runs.rows(),
                    "alone": alone_seconds,
                    "load": round(os.getloadavg()[0], 2),
                }
            )
        summary = runs.end()
    run_sends = sends.from_json(summary["sends"])
    # The sends of one row: all rows are alike.
    row_sends = run_sends._replace(steps=run_sends.steps[: method.steps])
    for record in records:
        load = record.pop("load")
        yield {**record, "sends": sends.to_json(row_sends), "load": load}


class LinkRuns:
    """Commands of `experiments.run`, one on each host; they end when a `with` does.

    Args:
        link: the link between the hosts.
        method: the method that all train with.
        flags: the flags of each command.
    """

    def __init__(self, link: NetworkLink, method: LinkMethod, flags: Sequence[str]):
        common_flags = (
            f"{method.flags} {COMMON} "
            f"--eval-every {method.steps} --dispatch-steps {method.steps}"
        )
        self._commands = [
            [*link.command(host), *PROGRAM, *f"{common_flags} {host_flags}".split()]
            for host, host_flags in enumerate(flags)
        ]

    def __enter__(self) -> "LinkRuns":
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            self._out = Path(folder, "0")
            self._log = stack.enter_context(Path(folder, "log").open("w+"))
            self._processes = []
            for host, command in enumerate(self._commands):
                out = str(Path(folder, str(host)))
                process = self._start_process(stack, [*command, "--out", out])
                self._processes.append(process)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_) -> None:
        self._stack.close()

    def _start_process(
        self, stack: ExitStack, command: Sequence[str]
    ) -> subprocess.Popen:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,  # Ctrl-C is for this process, which kills them
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
        return process

    def rows(self) -> list[float]:
        """Waits for rows that began on the current link; returns their seconds."""
        earlier_rows = len(self._clock())
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if any(process.poll() is not None for process in self._processes):
                break
            # The first row that ends on this link began on the previous one.
            seconds = np.diff(self._clock()[earlier_rows:])
            if len(seconds) >= REPEATS and seconds.sum() >= SECONDS:
                return [round(float(x), 6) for x in seconds]
            time.sleep(0.05)
        raise self._exit_with_log(f"no {REPEATS} rows in {PATIENCE} s")

    def _clock(self) -> list[float]:
        """Returns the seconds of training at each row so far."""
        path = self._out / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line)["seconds"] for line in lines]

    def end(self) -> dict[str, Any]:
        """Stops the commands; returns the summary of the first."""
        for process in self._processes:
            process.send_signal(signal.SIGTERM)
        codes = [process.wait(PATIENCE) for process in self._processes]
        if {*codes} != {stopping.TERMINATED}:
            raise self._exit_with_log(f"exit codes {codes}")
        return json.loads((self._out / "summary.json").read_text())

    def _exit_with_log(self, reason: str) -> SystemExit:
        self._log.seek(0)
        return SystemExit(f"{reason}:\n{self._log.read()}")


def compared(records: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields, for each record of a limited link, both times and their ratio."""
    for record in records:
        if record["rate"] is None:
            continue
        hosts = record["hosts"]
        steps = record["steps"]
        link = parse(f"{record['rate']}Mbit/s, {record['latency']}ms, gloo")
        row_sends = sends.from_json(record["sends"])
        row_seconds = modelled_seconds(row_sends, link, hosts, 0.0)[-1]
        modelled = (row_seconds + cost(METRICS, link, hosts)) / steps
        took = (median(record["seconds"]) - median(record["alone"])) / steps
        yield {**record, "took": took, "ratio": took / modelled}


def format_link_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Returns ms per step and their ratio to the model, with a row per setting."""
    rows: dict[tuple[float, ...], dict[str, Any]] = {}
    for record in compared(records):
        hosts = record["hosts"]
        hidden = record["hidden"]
        position = (hosts, hidden, -record["rate"], record["latency"])
        size = terminal.format_bytes(4 * (795 * hidden + 10))
        link = f"{record['rate']:g} Mbit/s, {record['latency']:g} ms"
        head = {"workers": hosts, "model": size, "link": link}
        row = rows.setdefault(position, head | dict.fromkeys(METHODS, ""))
        # Three digits, without an exponent.
        took = float(f"{1000 * record['took']:.3g}")
        row[record["algorithm"]] = f"{took:,g} ({record['ratio']:.2f})"
    sorted_rows = [rows[position] for position in sorted(rows)]
    columns = {}
    for column in ("workers", "model", "link", *METHODS):
        if any(row[column] for row in sorted_rows):
            columns[column] = column
    return table_of_records(columns, sorted_rows)


def read_numbers(text: str) -> list[float]:
    """Reads the numbers of --rates and --latencies."""
    return [float(x) for x in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description="Training over a real slow link.")
    parser.add_argument(
        "--rates", type=read_numbers, default=RATES, help="rates in Mbit/s"
    )
    parser.add_argument(
        "--latencies", type=read_numbers, default=LATENCIES, help="in ms"
    )
    parser.add_argument("--hosts", type=int, nargs="+", default=[2])
    parser.add_argument("--hidden", type=int, nargs="+", default=[640], help="units")
    parser.add_argument("--algos", nargs="+", choices=METHODS, default=[*METHODS])
    parser.add_argument("--out", type=Path, help="append records to this file")
    parser.add_argument("--records", type=Path, help="only show the table of this file")
    arguments = parser.parse_args()
    if arguments.records:
        lines = arguments.records.read_text().splitlines()
        print(format_link_table([json.loads(line) for line in lines]))
        return 0
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    links = [*itertools.product(arguments.rates, arguments.latencies)]
    records = []
    for hosts in arguments.hosts:
        with ExitStack() as stack:
            try:
                link = stack.enter_context(NetworkLink(hosts))
            except OSError as error:
                print(f"skipped: {error}")
                return 0
            for hidden, name in itertools.product(arguments.hidden, arguments.algos):
                new_records = [
                    *map(print_record, measure_link(link, name, links, hidden))
                ]
                records += new_records
                if arguments.out:
                    lines = [json.dumps(record) + "\n" for record in new_records]
                    with arguments.out.open("a") as file:
                        file.writelines(lines)
    print(f"\n{format_link_table(records)}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
