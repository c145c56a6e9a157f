"""The colour, line and marker of each algorithm, in figures and legends."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

TEMPLATES = Path(__file__).with_name("templates")
CSS = (TEMPLATES / "report.css").read_text()
# All colours are defined in the stylesheet; its first block is for the light page.
LIGHT = dict(re.findall(r"--([\w-]+): (#\w{6})", CSS.partition("@media")[0]))
VARIABLES = {colour: f"var(--{name})" for name, colour in LIGHT.items()}

# Seven hues, then each in two other tones. Color-blind readers can distinguish them,
# too: simulated after Machado (2009), any two of the first seven and any two tones of
# a hue are 10 or more apart in CIE Lab, where 2.3 is just noticeable.
HUES = 7
COLOURS = [colour for name, colour in LIGHT.items() if name.startswith("series-")]
DASHES = ((), (6, 2), (2, 1.5), (7, 2, 1.5, 2), (10, 2))
MARKERS = "os^DvPX"  # matplotlib's names; the page's template has their shapes

Styles = Mapping[str, dict[str, Any]]


def templates() -> Environment:
    """Returns the templates of the pages."""
    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        # Labels are text of the user, which must not become tags.
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        # A misspelt name raises an error instead of leaving a gap in the page.
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )


def styles(algos: Mapping[str, str]) -> Styles:
    """Gives each label its own style: one hue per algorithm, one tone per variant.

    Args:
        algos: names of algorithms by label, in the order of the legend.

    Returns:
        Properties of matplotlib lines by label: color, linestyle and marker.
    """
    hues = list(dict.fromkeys(algos.values()))
    seen = dict.fromkeys(hues, 0)
    found = {}
    for i, (label, algo) in enumerate(algos.items()):
        turn, hue = divmod(hues.index(algo), HUES)
        tone = (turn + seen[algo]) % (len(COLOURS) // HUES)
        seen[algo] += 1
        # Five dashes and seven markers: the dash moves on by one more step each round,
        # so that no combination repeats before 35 labels.
        dash = DASHES[(i + i // len(MARKERS)) % len(DASHES)]
        found[label] = {
            "color": COLOURS[tone * HUES + hue],
            "linestyle": (0, dash) if dash else "-",
            "marker": MARKERS[i % len(MARKERS)],
        }
    return found
