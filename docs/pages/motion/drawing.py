"""Draws recorded workers as an animated SVG, without script."""

from string import Template

import numpy as np

from pages.motion import landscape
from pages.motion.film import FLOOR, PAUSE_PICTURES, WIDTH, Film, Recorded, film, pixels
from pages.motion.shapes import (
    animate,
    cross,
    duration,
    line,
    petal,
    place_group,
    smooth_loop,
    travel,
    write_numbers,
)

HEIGHT = 420  # below the floor are a legend and the steps
START_X = 24
END_X = 616  # of the line of steps
PARTS = "card", "edge", "deep", "line", "ink", "soft", "halo", "w0", "w1", "w2", "w3"
# Those of the workers are Okabe and Ito's, which the colour-blind can tell apart.
LIGHT = ["#f7f8fa", "#c9ced6", "#2f6fb3", "#fff", "#11151c", "#566072", "#fff"]
LIGHT += ["#0072b2", "#d55e00", "#009e73", "#b0478a"]
DARK = ["#171c26", "#3a4354", "#4a8be0", "#0d1118", "#f4f6fa", "#a3aec0", "#10141c"]
DARK += ["#56b4e9", "#e69f00", "#2fc79b", "#e58fc0"]
# Quarters of a disc, towards the workers' own minima: together they make it whole.
TURNS = (180, 90, 0, 270)
GLOW = (0.9, 0.9, 0.8, 0.6, 0.3, 0)  # of a sync, by picture
TAILS = ((150, 2, 0.3), (70, 2.8, 0.4), (26, 3.6, 0.9))  # length, width, opacity

# Programs for slides know neither variables nor queries: they show it still and light.
STYLE = """
$ID text{font:12px system-ui,sans-serif}
$ID .name{font:600 18px ui-monospace,monospace}
$ID .deep{fill-opacity:.04;stroke-width:.8}
$ID .trail{fill:none;stroke:currentColor;stroke-linejoin:round;stroke-linecap:round}
$ID .sync{fill:none;stroke-width:1.6;stroke-linecap:round}
$ID .worker{fill:currentColor;stroke-width:1}
$ID .needle{stroke:currentColor;stroke-width:2;stroke-linecap:round}
$ID .center{stroke-width:1.6}
$ID .cross{stroke:currentColor;stroke-width:2;fill:none}
$ID .edge{fill:none}
$ID .moving{display:none}
$ID .whole{opacity:.8}
$light
@media (prefers-color-scheme:dark){$dark}
@media screen and (prefers-reduced-motion:no-preference){$ID .still{display:none}\
$ID .moving{display:inline}$ID .whole{opacity:.35}}
"""
COLOURS = """$ID{color:$ink}$ID .card{fill:$card}$ID .edge{stroke:$edge}\
$ID text{fill:$soft}$ID .name,$ID .center{fill:$ink}$ID .sync{stroke:$ink}\
$ID .deep{fill:$deep;stroke:$line}$ID .worker,$ID .center{stroke:$halo}\
$ID .w0{color:$w0}$ID .w1{color:$w1}$ID .w2{color:$w2}$ID .w3{color:$w3}"""


def svg(recorded: Recorded) -> str:
    """Returns a picture that moves for ever, and says as much without moving."""
    film_pictures = film(recorded)
    key = f"way-{recorded.name}"
    parts = [
        *_head(recorded, key),
        *_ground(key),
        *_trails(film_pictures, key),
        *_center_way(film_pictures),
        *_markers(film_pictures),
        *_foot(recorded, film_pictures),
        "</g>",
        f'<rect class="edge" x=".5" y=".5" width="{WIDTH - 1}" height="{HEIGHT - 1}" '
        'rx="12"/>',
        "</svg>\n",
    ]
    return "\n".join(parts)


def _head(recorded: Recorded, key: str) -> list[str]:
    """Returns the beginning: what it shows, in words, and its colours."""
    steps, workers = recorded.local.shape[:2]
    light, dark = (
        Template(COLOURS).substitute(
            dict(zip(PARTS, colours, strict=True)), ID=f"#{key}"
        )
        for colours in (LIGHT, DARK)
    )
    style = Template(STYLE.strip()).substitute(ID=f"#{key}", light=light, dark=dark)
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" id="{key}" role="img" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" aria-labelledby="{key}-title {key}-desc">',
        f'<title id="{key}-title">{recorded.name} on a curved loss</title>',
        f'<desc id="{key}-desc">{workers} workers, each with its own data, take '
        f"{steps} local steps through a curved valley towards its lowest point, from "
        f"the upper left to the middle right. {_when(recorded)}. A dot is the "
        "center, the model to evaluate.</desc>",
        f"<style>{style}</style>",
        f'<clipPath id="{key}-card">'
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="12"/></clipPath>',
        f'<clipPath id="{key}-plot"><rect width="{WIDTH}" height="{FLOOR}"/>'
        "</clipPath>",
        f'<g clip-path="url(#{key}-card)">',
        f'<rect class="card" width="{WIDTH}" height="{HEIGHT}"/>',
    ]


def _when(recorded: Recorded) -> str:
    """Returns when the workers sync, and the algorithm's settings, in words."""
    steps = len(recorded.syncs)
    count = int(recorded.syncs.sum())
    gaps = np.diff(np.flatnonzero(recorded.syncs))
    when = f"{count} syncs in {steps} steps"
    if count == steps:
        when = "A sync at every step"
    elif count > 1 and gaps.min() == gaps.max():
        when = f"A sync every {gaps[0]} steps"
    return "; ".join(filter(None, (when, recorded.settings)))


def _ground(key: str) -> list[str]:
    """Returns lines of equal loss, and crosses where a loss is lowest."""
    lines = [
        f'<path class="deep" d="{smooth_loop(pixels(landscape.contour(level)))}"/>'
        for level in landscape.LEVELS[::-1]
    ]
    crosses = [
        f'<path class="cross w{i}" d="{cross(place, 4)}"/>'
        for i, place in enumerate(pixels(landscape.own_minima()))
    ]
    best = cross(pixels(landscape.BEST), 6)
    clipped = f'<g clip-path="url(#{key}-plot)">'
    return [clipped, *lines, "</g>", *crosses, f'<path class="cross" d="{best}"/>']


def _trails(pictures: Film, key: str) -> list[str]:
    """Returns the whole ways, faint, and tails that follow the workers."""
    parts = []
    for i, turn in enumerate(TURNS):
        places = pictures.workers[:, i]
        steps = np.linalg.norm(np.diff(places, axis=0), axis=1)
        distances = np.concatenate([[0.0], steps.cumsum()])
        # Ways run from the end to the start, so that one offset of dashes fits tails of
        # any length. The offset stays above 0, as Safari wants it.
        period = np.ceil(distances[-1]) + 200
        tails = [
            f'<use href="#{key}-{i}" stroke-width="{width}" stroke-opacity="{opacity}" '
            f'stroke-dasharray="{length} {period - length:.0f}"/>'
            for length, width, opacity in TAILS
        ]
        # Ways that coincide lie beside each other, as stripes.
        shift = 1.4 * np.cos(np.radians(turn)), 1.4 * np.sin(np.radians(turn))
        parts += [
            f'<g class="trail w{i}" '
            f'transform="translate({write_numbers(shift, " ")})">',
            '<g class="whole" stroke-width="1.3">',
            f'<path id="{key}-{i}" d="{line(places[:-PAUSE_PICTURES][::-1])}"/>',
            f'</g><g class="moving">{_fade(pictures)}',
            animate("stroke-dashoffset", np.round(distances - distances[-1] + period)),
            *tails,
            "</g></g>",
        ]
    return parts


def _center_way(pictures: Film) -> list[str]:
    """Returns the center's way, and a dot where a sync alone has taken it."""
    dots = "".join(
        f"M{write_numbers(pictures.center[flash + 3], ' ')}h0"
        for flash in pictures.flashes
    )
    return [
        f'<path class="sync" d="{line(pictures.center[:-PAUSE_PICTURES])}" '
        'style="stroke-width:.8;opacity:.6"/>',
        f'<path class="sync" d="{dots}" style="stroke-width:4.4;opacity:.75"/>',
    ]


def _markers(pictures: Film) -> list[str]:
    """Returns the workers and their center, moving; and still, at their last places."""
    quarter = petal(11)
    dot = '<circle class="center" r="4"/>'
    moving = []
    still = []
    has_needles = np.abs(pictures.needles).max() > 0.5
    for i, turn in enumerate(TURNS):
        places = pictures.workers[:, i]
        needles = pictures.needles[:, i]
        worker = f'<path class="worker" transform="rotate({turn})" d="{quarter}"/>'
        needle = (
            ['<line class="needle">']
            + [animate(f"{axis}2", needles[:, j]) for j, axis in enumerate("xy")]
            + ["</line>"]
        )
        moving += [f'<g class="w{i}">', travel(places)]
        moving += [*(needle if has_needles else []), worker, "</g>"]
        still.append(f'<g class="w{i}" {place_group(places[-1])}>{worker}</g>')
    return [
        f'<g class="moving">{_fade(pictures)}',
        _links(pictures) if pictures.flashes else "",
        *moving,
        f"<g>{travel(pictures.center)}{_ring(pictures)}{dot}</g></g>",
        f'<g class="still">{"".join(still)}'
        f"<g {place_group(pictures.center[-1])}>{dot}</g></g>",
    ]


def _links(pictures: Film) -> str:
    """Returns lines along which a sync moves the workers, while it does."""
    count = len(pictures.step)
    lines = []
    for flash in pictures.flashes:
        starts = pictures.workers[flash]
        ends = pictures.workers[flash + 3]
        moves = map(np.array, zip(starts, ends, strict=True))
        lines.append("".join(map(line, moves)))
    times = [0, *(flash / (count - 1) for flash in pictures.flashes)]
    return (
        f'<path class="sync">{animate("opacity", _glow(pictures))}'
        '<animate attributeName="d" calcMode="discrete" repeatCount="indefinite" '
        f'dur="{duration(count)}s" keyTimes="{write_numbers(times, ";", 4)}" '
        f'values="{";".join(["M0 0", *lines])}"/></path>'
    )


def _ring(pictures: Film) -> str:
    """Returns a ring that grows around the center at each sync that stands alone."""
    if not pictures.flashes:
        return ""
    size = np.full(len(pictures.step), 6)
    for flash in pictures.flashes:
        size[flash : flash + len(GLOW)] = 8 + 5 * np.arange(len(GLOW))
    moving = animate("r", size) + animate("opacity", _glow(pictures))
    return f'<circle class="sync">{moving}</circle>'


def _glow(pictures: Film) -> np.ndarray:
    """Returns the light of syncs over the film."""
    glow = np.zeros(len(pictures.step))
    for flash in pictures.flashes:
        glow[flash : flash + len(GLOW)] = GLOW
    return glow


def _foot(recorded: Recorded, pictures: Film) -> list[str]:
    """Returns the name, a legend, and the line of steps with its syncs."""
    steps = len(recorded.syncs)
    along = np.linspace(START_X, END_X, steps + 1)
    ticks = "".join(f"M{x:.1f} 399v7" for x in along[1:][recorded.syncs])
    petals = "".join(
        f'<path class="worker w{i}" transform="rotate({turn})" d="{petal(8)}"/>'
        for i, turn in enumerate(TURNS)
    )
    row = FLOOR + 22
    return [
        f'<text class="name" x="{WIDTH / 2:.0f}" y="32" text-anchor="middle">'
        f"{recorded.name}</text>",
        f'<text x="{WIDTH / 2:.0f}" y="51" text-anchor="middle">{_when(recorded)}'
        "</text>",
        f'<g transform="translate({START_X + 8} {row - 4})">{petals}</g>'
        f'<text x="{START_X + 22}" y="{row}">workers</text>',
        f'<circle class="center" cx="{START_X + 96}" cy="{row - 4}" r="4"/>'
        f'<text x="{START_X + 106}" y="{row}">center</text>',
        f'<path class="cross" d="{cross(np.array([START_X + 172, row - 4]), 5)}"/>'
        f'<text x="{START_X + 183}" y="{row}">lowest mean loss</text>',
        f'<path class="cross w0" d="{cross(np.array([START_X + 306, row - 4]), 4)}"/>'
        f'<text x="{START_X + 316}" y="{row}">lowest of one worker</text>',
        f'<text x="{END_X}" y="{row}" text-anchor="end">{steps} steps, syncs marked'
        "</text>",
        f'<path class="edge" d="M{START_X} 406H{END_X}" stroke-width="2"/>',
        f'<path class="sync" d="{ticks}"/>',
        '<circle class="center moving" cy="406" r="4.5">'
        f"{animate('cx', along[pictures.step])}</circle>",
    ]


def _fade(pictures: Film) -> str:
    """Returns the light of all that moves: the film begins and ends with less."""
    return (
        f'<animate attributeName="opacity" dur="{duration(len(pictures.step))}s" '
        'repeatCount="indefinite" keyTimes="0;.02;.96;1" values="0;1;1;0"/>'
    )
