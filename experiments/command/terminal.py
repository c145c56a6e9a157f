"""Output of a run: header and progress on stderr, the summary on stdout."""

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from rich import progress
from rich.console import Console
from rich.table import Column
from rich.text import Text

from experiments.command.stopping import printable, say
from experiments.command.text_tables import wrap_text

MISSING = "–"
# (columns of a terminal, from which on the bar has this width)
BAR_WIDTHS = ((100, 40), (80, 20))
LEAST_BAR = 6
# (bound, unit, length of the unit): a time below the bound is shown in this unit.
DURATIONS = (
    (1e-3, "µs", 1e-6),
    (1, "ms", 1e-3),
    (60, "s", 1),
    (3600, "min", 60),
    (48 * 3600, "h", 3600),
    (math.inf, "days", 86400),
)


class ProgressDisplay:
    """The display of a run's progress; this one shows nothing."""

    def step(self, steps_done: int, loss: float) -> None:
        """Shows how many local steps are done, and the loss of the last one."""

    def line(self, text: str) -> None:
        """Shows a line of text."""


class _Bar(ProgressDisplay):
    """A bar under the lines; if stderr is no terminal, only the lines."""

    def __init__(self, bar: progress.Progress, steps: int):
        self.bar = bar
        # A narrow terminal has room for the numbers alone.
        description = "training" if bar.console.width >= BAR_WIDTHS[-1][0] else ""
        self.task = bar.add_task(description, total=steps, loss="compiling")

    def step(self, steps_done: int, loss: float) -> None:
        self.bar.update(self.task, completed=steps_done, loss=f"loss {figure(loss)}")

    def line(self, text: str) -> None:
        above(self.bar, text)


@contextmanager
def open_report(steps: int) -> Iterator[ProgressDisplay]:
    """Yields a progress bar if stderr is a terminal, plain lines otherwise."""
    count = progress.MofNCompleteColumn(table_column=Column(no_wrap=True))
    time_left = progress.TimeRemainingColumn(table_column=Column(no_wrap=True))
    loss = "{task.fields[loss]}"
    with bar(
        count, "steps", loss, elapsed_time(), "+", time_left, "left"
    ) as progress_bar:
        yield _Bar(progress_bar, steps)


class _Description(progress.ProgressColumn):
    """What a line of the bar is about; a narrow terminal shows its beginning."""

    def render(self, task: progress.Task) -> Text:
        # Text in place of a format: brackets in a label are not markup.
        return Text(task.description, no_wrap=True, overflow="ellipsis")


def bar(*columns: str | progress.ProgressColumn) -> progress.Progress:
    """Makes a bar on stderr, hidden if stderr is no terminal.

    Where the terminal is narrow, the bar gets shorter, then the description.

    Args:
        columns: what stands behind the description and the bar. Columns of one's own
            must not wrap, or they are the ones that get shorter.
    """
    # stdout holds only the summary, so that it can be piped.
    console = Console(stderr=True)
    is_hidden = not sys.stderr.isatty()
    return progress.Progress(
        _Description(),
        bar_column(console),
        *columns,
        console=console,
        transient=True,
        disable=is_hidden,
    )


def bar_column(console: Console) -> progress.BarColumn:
    """Makes the bar itself, whose width leaves room for the texts beside it."""
    widths = [width for least, width in BAR_WIDTHS if console.width >= least]
    column = Column(max_width=max(widths, default=LEAST_BAR))
    return progress.BarColumn(bar_width=None, table_column=column)


def elapsed_time() -> progress.TimeElapsedColumn:
    """Makes the column of the time so far, which is never cut."""
    return progress.TimeElapsedColumn(table_column=Column(no_wrap=True))


def above(bar: progress.Progress, text: str) -> None:
    """Prints a line above a bar, if there is one."""
    if bar.disable:
        return say(text)
    for line in wrap_text(printable(text), bar.console.width):
        # Brackets in an error message are not markup.
        bar.console.print(line, highlight=False, markup=False, soft_wrap=True)


def show(text: str) -> None:
    """Prints a text on stdout, if it can be shown."""
    with suppress(OSError, ValueError):
        print("\n".join(map(printable, text.split("\n"))), flush=True)


def label_measures(
    measures: Mapping[str, float | None], validation: float | None
) -> dict[str, float | None]:
    """Returns measures by label, such as "test loss".

    Args:
        measures: the measures by name, such as "test_loss".
        validation: the share of training data that was held out; None means that the
            test data was used.
    """
    held_out = "test" if validation is None else "validation"
    return {
        name.replace("test_", f"{held_out}_").replace("_", " "): x
        for name, x in measures.items()
    }


def figure(x: float | None) -> str:
    """Formats a loss, an accuracy or a rate."""
    if x is None:
        return "none"
    return f"{x:.4f}" if x == 0 or 1e-3 <= abs(x) < 1000 else f"{x:.3g}"


def count(x: float) -> str:
    """Formats a number per second, with two digits below 10."""
    return f"{x:,.0f}" if x >= 10 else f"{x:.2g}"


def format_bytes(bytes_: float) -> str:
    """Formats a number of bytes."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if bytes_ < 1000 or unit == "TB":
            break
        bytes_ /= 1000
    return f"{bytes_:.4g} {unit}"


def duration(seconds: float | None, digits: int = 3) -> str:
    """Returns "1.2 ms", "34 s", "5.6 min", "7.8 h" or "9.1 days"; at most 3 digits."""
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    if seconds == 0:
        return "0 s"
    # 59.97 s would be rounded to 60 s, and is shown as 1 min instead.
    unit, length = next(x[1:] for x in DURATIONS if seconds < x[0] * 0.9995)
    return f"{three_digits(float(f'{seconds / length:.{digits}g}'))} {unit}"


def three_digits(x: float) -> str:
    """Formats three digits, or from 1,000 up the whole number."""
    return f"{x:.3g}" if x < 999.5 else f"{x:,.0f}"


def rate(x: float | None) -> str:
    """Formats a learning rate: "none" for None, "not found" for NaN."""
    if x is None:
        return "none"
    return "not found" if math.isnan(x) else f"{x:g}"


def effective(x: float | None) -> str:
    """Formats an effective learning rate with its name."""
    return "no effective rate is defined" if x is None else f"{rate(x)} effective"


def mesh_text(mesh: Mapping[str, int]) -> str:
    """Formats the sizes of the axes within a worker; "" if there are none."""
    return ", ".join(f"{name} {size}" for name, size in mesh.items())
