"""What a run shows: a header and progress on stderr, a summary on stdout."""

import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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
        print(text, file=sys.stderr, flush=True)


class _Bar:
    """A bar under the lines, for a terminal."""

    def __init__(self, progress: Progress, steps: int):
        self.progress = progress
        self.task = progress.add_task("training", total=steps)

    def step(self, done: int) -> None:
        self.progress.update(self.task, completed=done)

    def line(self, text: str) -> None:
        self.progress.console.print(text, highlight=False, markup=False)


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


def show(text: str) -> None:
    """The summary, on stdout, where somebody may have stopped reading."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for the flush at exit


def say(text: str) -> None:
    """A line of the header, or an error."""
    print(text, file=sys.stderr, flush=True)


def evaluation_line(line: dict[str, Any], steps: int) -> str:
    """One evaluation, to read."""
    shown = ("train_loss", "test_loss", "test_accuracy")
    figures = [f"{name.replace('_', ' ')} {figure(line[name])}" for name in shown]
    return "  ".join([f"step {line['step']:>{len(str(steps))}}/{steps}", *figures])


def figure(x: float | None) -> str:
    """A loss, an accuracy or a rate."""
    if x is None:
        return "none"
    return f"{x:.4f}" if x == 0 or 1e-3 <= abs(x) < 1000 else f"{x:.3g}"


def size(count: float) -> str:
    """A number of bytes."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            break
        count /= 1000
    return f"{count:.4g} {unit}"


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
    nominal, effective = rate(s["lr"]), rate(s["effective_lr"])
    rows = {
        "train loss": figure(s["train_loss"]),
        "test loss": figure(s["test_loss"]),
        "test accuracy": figure(s["test_accuracy"]),
        "learning rate": f"{nominal} nominal, {effective} effective",
        "each worker sent": sent,
        "speed": f"{speed:,.0f} steps/s, {speed * s['workers']:,.0f} worker-steps/s",
        "layout": f"{layout_text(s)}, backend {s['backend']}",
        "time": f"{s['seconds']:.1f} s training, {s['total_seconds']:.1f} s in all",
        "files": str(out),
    }
    head = (
        f"{s['algo']} on {s['task']}: {s['steps']} steps of batch {s['batch_size']}, "
        f"seed {s['seed']}"
    )
    return "\n".join([head, *(f"  {name:<17} {text}" for name, text in rows.items())])


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
    return f"{workers} on {devices} × {lanes}"
