"""The look of each algorithm, in every figure and beside its name."""

from collections.abc import Mapping
from typing import Any, NamedTuple

# Seven hues, then each in two other tones. Eyes without one kind of cone tell them
# apart too: simulated after Machado (2009), any two of the first seven and any two
# tones of a hue are 10 or more apart in CIE Lab. report.css has those of dark pages.
HUES = 7
COLOURS = (
    *("#00557c", "#a94300", "#00885a", "#8961cf", "#a99300", "#252d33", "#f55e8b"),
    *("#7194b9", "#e0764a", "#003c1d", "#311478", "#5e4b10", "#878c92", "#540027"),
    *("#00293e", "#5a2200", "#5c9f82", "#633fa8", "#7f7a45", "#595f65", "#aa3a65"),
)
DASHES = ((), (6, 2), (2, 1.5), (7, 2, 1.5, 2), (10, 2))
MARKERS = {  # as matplotlib names them, and as paths around 13, 6
    "o": "M9.5 6a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0z",
    "s": "M9.8 2.8h6.4v6.4h-6.4z",
    "^": "M13 2l4.1 7.2H8.9z",
    "D": "M13 1.6L17.4 6 13 10.4 8.6 6z",
    "v": "M13 10L8.9 2.8h8.2z",
    "P": "M11.6 2h2.8v2.6H17v2.8h-2.6V10h-2.8V7.4H9V4.6h2.6z",
    "X": "M9 3.8L10.8 2 13 4.2 15.2 2 17 3.8 14.8 6 17 8.2 15.2 10 13 7.8 10.8 10 9 8.2"
    " 11.2 6z",
}


class Look(NamedTuple):
    """The colour, line and marker of one algorithm.

    Attributes:
        series: the index of its colour.
        dash: lengths of line and gap, in widths of the line; () for a full line.
        marker: as matplotlib names it.
    """

    series: int
    dash: tuple[float, ...]
    marker: str

    @property
    def colour(self) -> str:
        """On white paper."""
        return COLOURS[self.series]

    @property
    def linestyle(self) -> Any:
        """The dash as matplotlib takes it."""
        return (0, self.dash) if self.dash else "-"


def looks(algos: Mapping[str, str]) -> dict[str, Look]:
    """Gives each label a look of its own: a hue to an algorithm, tones to its variants.

    Args:
        algos: the algorithm's name by label, in the order in which they are shown.
    """
    hues = list(dict.fromkeys(algos.values()))
    seen = dict.fromkeys(hues, 0)
    found = {}
    for i, (label, algo) in enumerate(algos.items()):
        turn, hue = divmod(hues.index(algo), HUES)
        tone = (turn + seen[algo]) % (len(COLOURS) // HUES)
        seen[algo] += 1
        dash = DASHES[(i + i // len(MARKERS)) % len(DASHES)]
        found[label] = Look(tone * HUES + hue, dash, list(MARKERS)[i % len(MARKERS)])
    return found
