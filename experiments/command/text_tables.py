"""Tables and paragraphs of text that fit the terminal's width.

Nothing is cut: texts wrap at spaces, but not between a number and its unit, and columns
that have no room are left out and named.
"""

import re
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

from rich.cells import cell_len, chop_cells, set_cell_size

GAP = 2  # spaces between columns
LEAST_TEXT = 20  # characters to which a column of text may shrink
LEAST_WIDTH = 20  # characters of the narrowest terminal that texts are fitted to
NO_BREAK = "\u00a0"
# Spaces between a figure and its unit, around ± and within an interval.
TIED = re.compile(
    r"(?<=\d) (?=%|points|seeds|runs|times|(?:[kMGT]?B|[mµ]?s|min|h|days)\b)"
    r"|(?<=±) | (?=±)|(?<=\d,) (?=-?[\d.e+-]+\])"
)
BEFORE_FIGURE = re.compile(r"(?<=[a-z]) (?=\d+\.\d)")  # between a name and its figure
Row = Mapping[str, str]  # text by column; the first column names the row


class Columns(NamedTuple):
    """What may happen to the columns of a table that is wider than the terminal.

    Attributes:
        text: columns whose cells may wrap at spaces; those of others stay in one line.
        optional: columns that may be left out, the first ones first.
        elsewhere: where all columns are, in words; "" leaves none out.
    """

    text: Collection[str]
    optional: Sequence[str]
    elsewhere: str


def terminal_width() -> int | None:
    """Returns the number of columns of the terminal; None if stdout is none.

    COLUMNS comes before the size that the terminal reports. In a file or a pipe,
    tables keep all columns, and nothing is wrapped.
    """
    if not sys.stdout.isatty():
        return None
    return max(shutil.get_terminal_size().columns, LEAST_WIDTH)


def tie_units(text: str) -> str:
    """Returns a text with no-break spaces between numbers and their units."""
    return TIED.sub(NO_BREAK, text)


def wrap_text(text: str, width: int | None, indent: str = "") -> list[str]:
    """Returns a text in lines that are no wider than the terminal.

    Args:
        text: one line. It is broken at spaces; a word that is wider than a line, such
            as a path, stays whole, so that it can be copied.
        width: of the terminal; None leaves the text in one line.
        indent: what the second line and later ones begin with.
    """
    if width is None:
        return [text]
    start = text[: len(text) - len(text.lstrip(" "))]
    lines = []
    line = start
    is_empty = True
    for word in _words(text[len(start) :]):
        if not is_empty and cell_len(f"{line} {word}") > width:
            lines.append(line)
            line = indent
            is_empty = True
        line += word if is_empty else f" {word}"
        is_empty = False
    return [x.replace(NO_BREAK, " ").rstrip() for x in [*lines, line]]


def format_text_table(
    rows: Sequence[Row], columns: Columns, width: int | None
) -> list[str]:
    """Returns a table in lines, which are no wider than the terminal.

    If it is too wide, headings wrap at spaces, then columns of text. If that does not
    suffice, optional columns are left out, and a last line says so. If even the others
    have no room, each row becomes a paragraph that has all columns.

    Args:
        rows: one row or more, all with the same columns in the same order.
        columns: what may wrap, and what may be left out.
        width: of the terminal; None keeps all columns, in one line for each row.
    """
    names = [*rows[0]]
    if width is None:
        return _lines(rows, {name: _natural(rows, name) for name in names})
    possible = [x for x in columns.optional if x in names] if columns.elsewhere else []
    for count in range(len(possible) + 1):
        left_out = possible[:count]
        kept_names = [name for name in names if name not in left_out]
        widths = _fit(rows, kept_names, columns.text, width)
        if widths is not None:
            lines = _lines(rows, widths)
            if left_out:
                note = f"(no room for: {', '.join(left_out)}; {columns.elsewhere})"
                lines += wrap_text(note, width)
            return lines
    return _stack_rows(rows, width)


def definitions(texts: Row, width: int | None, indent: int = 2) -> list[str]:
    """Returns names with their texts beside them, in lines that fit the terminal.

    Args:
        texts: text by name.
        width: of the terminal; None leaves each text in one line.
        indent: spaces before each name.
    """
    start = " " * indent
    name_width = max(map(cell_len, texts)) + GAP
    text_width = None
    if width is not None:
        # Where names take half of the terminal, they wrap as well.
        widest_name_word = max(map(_widest_word, texts))
        name_width = max(min(name_width, width // 2), widest_name_word + GAP)
        text_width = width - indent - name_width
    lines = []
    for name, text in texts.items():
        least_width = max(LEAST_TEXT, _widest_word(text))
        if width is not None and text_width is not None and text_width < least_width:
            # It has more room below its name.
            lines += wrap_text(f"{start}{name}", width, start)
            lines += wrap_text(f"{start}{start}{text}", width, f"{start}{start}")
            continue
        name_lines = wrap_text(name, None if width is None else name_width - GAP)
        text_lines = wrap_text(text, text_width)
        for head, line in zip_longest(name_lines, text_lines, fillvalue=""):
            lines.append(f"{start}{set_cell_size(head, name_width)}{line}".rstrip())
    return lines


def _stack_rows(rows: Sequence[Row], width: int) -> list[str]:
    """Returns each row as its name and, below it, its other columns."""
    lines = []
    for row in rows:
        (_, label), *other_cells = row.items()
        for line in [*wrap_text(label, width), *definitions(dict(other_cells), width)]:
            # Labels are the user's: one word may be wider than the terminal.
            lines += chop_cells(line, width) or [line]
    return lines


def _lines(rows: Sequence[Row], widths: Mapping[str, int]) -> list[str]:
    """Returns the heading and the rows, in columns of these widths."""
    lines = []
    for row in [{name: name for name in widths}, *rows]:
        cells = [wrap_text(row[name], width) for name, width in widths.items()]
        for parts in zip_longest(*cells, fillvalue=""):
            sized = map(set_cell_size, parts, widths.values())
            lines.append((" " * GAP).join(sized).rstrip())
    return lines


def _fit(
    rows: Sequence[Row], names: Sequence[str], text: Collection[str], width: int
) -> dict[str, int] | None:
    """Returns widths at which the columns fit the terminal; None if there are none."""
    widths = {name: _natural(rows, name) for name in names}
    # To these the headings wrap, and no cell does.
    whole_widths = {}
    least = {}
    for name in names:
        cells = [row[name] for row in rows]
        heading = _widest_word(name)
        whole_widths[name] = max(heading, *map(cell_len, cells))
        least[name] = whole_widths[name]
        if name in text:
            word = max(heading, *map(_widest_word, cells))
            least[name] = max(word, min(whole_widths[name], LEAST_TEXT))
    room = width - GAP * (len(names) - 1)
    if sum(least.values()) > room:
        return None
    while sum(widths.values()) > room:
        widest_name = max(names, key=lambda name: widths[name] - whole_widths[name])
        if widths[widest_name] == whole_widths[widest_name]:
            # No heading can give way: the widest column of text does.
            shrinking = [name for name in names if widths[name] > least[name]]
            widest_name = max(shrinking, key=lambda name: widths[name])
            whole_widths[widest_name] -= 1
        widths[widest_name] -= 1
    return widths


def _natural(rows: Sequence[Row], name: str) -> int:
    """Returns the width at which neither the heading nor a cell of a column wraps."""
    return max(cell_len(name), *(cell_len(row[name]) for row in rows))


def _widest_word(text: str) -> int:
    return max(map(cell_len, _words(text)))


def _words(text: str) -> list[str]:
    """Returns what must stay in one line each."""
    return BEFORE_FIGURE.sub(NO_BREAK, tie_units(text)).split(" ")
