"""What a run shows: a header and progress on stderr, a summary on stdout."""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from experiments.cli.exits import printable, say


class Report(Protocol):
    """How a running loop tells where it is."""

    def step(self, done: int) -> None:
        """So many local steps are done."""
        ...

    def line(self, text: str) -> None:
        """Something to read."""
        ...


class _Plain:
    """Plain lines, for a file or a pipe."""

    def step(self, done: int) -> None:
        pass

    def line(self, text: str) -> None:
        say(text)


class _Bar:
    """A bar under the lines, for a terminal."""

    def __init__(self, progress: Progress, steps: int):
        self.progress = progress
        self.task = progress.add_task("training", total=steps)

    def step(self, done: int) -> None:
        self.progress.update(self.task, completed=done)

    def line(self, text: str) -> None:
        above(self.progress, text)


@contextmanager
def report(steps: int) -> Iterator[Report]:
    """A progress bar where stderr is a terminal, plain lines elsewhere."""
    if not sys.stderr.isatty():
        yield _Plain()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield _Bar(progress, steps)


def above(bar: Progress, text: str) -> None:
    """Prints a line above a bar."""
    bar.console.print(printable(text), highlight=False, markup=False)


def show(text: str) -> None:
    """Prints the summary on stdout, if it can be shown."""
    with suppress(OSError, ValueError):
        for line in text.split("\n"):
            print(printable(line))
        sys.stdout.flush()


def evaluation_line(line: dict[str, Any], steps: int) -> str:
    """One evaluation, to read."""
    figures = [f"{name} {figure(x)}" for name, x in measured(line).items()]
    return "  ".join([f"step {line['step']:>{len(str(steps))}}/{steps}", *figures])


def measured(line: dict[str, Any]) -> dict[str, float | None]:
    """The training loss and all that was measured on held-out data, by its name."""
    return {
        name.replace("_", " "): x
        for name, x in line.items()
        if name == "train_loss" or name.startswith("test_")
    }


def figure(x: float | None) -> str:
    """A loss, an accuracy or a rate."""
    if x is None:
        return "none"
    return f"{x:.4f}" if x == 0 or 1e-3 <= abs(x) < 1000 else f"{x:.3g}"


def count(x: float) -> str:
    """A rate, with as many digits as it deserves."""
    return f"{x:,.0f}" if x >= 10 else f"{x:.2g}"


def size(bytes_: float) -> str:
    """A number of bytes."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if bytes_ < 1000 or unit == "TB":
            break
        bytes_ /= 1000
    return f"{bytes_:.4g} {unit}"


def rate(x: float | None) -> str:
    """A learning rate; None where there is none, NaN where none was found."""
    return "none" if x is None else "not found" if math.isnan(x) else f"{x:g}"


def summary_text(summary: dict[str, Any], out: Any) -> str:
    """The summary that a person reads."""
    s = summary
    speed = s["steps_per_second"]
    sent = "not counted"
    if s["bytes_per_worker"] is not None:
        sent = f"{size(s['bytes_per_worker'])} in {s['syncs']} syncs"
        if s["decided"] is not None:
            sent += f", of which the data decided on {s['decided']}"
    memory = "not known"
    if s["temp_bytes"] is not None:
        memory = f"{size(s['temp_bytes'])} of intermediate results on a device"
    nominal, effective = rate(s["lr"]), rate(s["effective_lr"])
    rows = {
        **{name: figure(x) for name, x in measured(s).items()},
        "learning rate": f"{nominal} nominal, {effective} effective",
        "each worker sent": sent,
        "speed": f"{count(speed)} steps/s, {count(speed * s['workers'])} "
        f"worker-steps/s, {count(speed * s['batch_size'])} examples/s",
        "memory": memory,
        "layout": f"{layout_text(s)}, backend {s['backend']}",
        "time": f"{s['seconds']:.1f} s training, {s['total_seconds']:.1f} s in all",
        "files": str(out),
    }
    if s["export"] is not None:
        rows["model"] = s["export"]
    width = max(map(len, rows)) + 1
    head = (
        f"{s['algo']} on {s['task']}: {s['steps']} steps of batch {s['batch_size']}, "
        f"seed {s['seed']}"
    )
    lines = [f"  {name:<{width}} {text}" for name, text in rows.items()]
    return "\n".join([head, *lines])


def layout_text(s: dict[str, Any]) -> str:
    """Workers over devices × lanes, in words."""
    counts = (
        ("workers", "worker"),
        ("devices", s["platform"] + " device"),
        ("lanes", "lane"),
    )
    workers, devices, lanes = (
        f"{s[name]} {noun}{'' if s[name] == 1 else 's'}" for name, noun in counts
    )
    form = s.get("lane_form") if s["lanes"] > 1 else None  # known once it has trained
    return f"{workers} on {devices} × {lanes}{f' {form}' if form else ''}"
