"""Published figures of chips and of the networks between them: those of chips.toml."""

import string
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from experiments.study.network import PRESETS, Network, parse


class Chip(NamedTuple):
    """A chip.

    Attributes:
        name: as in a target.
        memory: bytes of HBM; None: no published figure.
        flops: peak FLOP/s of dense bfloat16 products; None: no published figure.
        source: where both figures stand, with the year.
    """

    name: str
    memory: int | None
    flops: float | None
    source: str


class Kind(NamedTuple):
    """A chip and its networks.

    Attributes:
        chip: the chip.
        inside: the link within a slice or host: a chip's bandwidth each way.
        between: the link between slices or hosts, a chip's share of it each way.
        sources: of the two links.
        most: chips of the largest slice, or GPUs of the largest host.
        example: a shape: "4x4", or hosts x GPUs.
        description: of a GPU, by which XLA compiles without it: a text proto.
    """

    chip: Chip
    inside: Network
    between: Network
    sources: tuple[str, ...]
    most: int = 0
    example: str = ""
    description: str = ""


def _kind(name: str, figures: dict[str, Any], platform: dict[str, Any]) -> Kind:
    """Returns a chip of the file, with the links of its platform."""
    links = (
        Network(f"{platform[x]['name']} of {name}", figures[x], platform[x]["latency"])
        for x in ("inside", "between")
    )
    source = figures["source"]
    return Kind(
        Chip(name, figures["memory"], figures["flops"], source),
        *links,
        sources=tuple(figures.get("link_sources", (source, source))),
        most=figures["most"],
        example=figures["example"],
        description=string.Template(platform.get("description", "")).substitute(
            figures.get("device", {}), memory=figures["memory"]
        ),
    )


PLATFORMS = {
    platform: {x: _kind(x, figures, of) for x, figures in of["chips"].items()}
    for platform, of in tomllib.loads(
        Path(__file__).with_name("chips.toml").read_text("utf-8")
    ).items()
}
"""Chips by the name of their platform, and by their own."""

CPU = Kind(
    Chip("cpu", None, None, "no published figures: machines differ"),
    parse("10gbe"),
    parse("10gbe"),
    (f"IEEE 802.3ae, {PRESETS['10gbe']}",) * 2,
)
"""Virtual devices of one machine, in place of machines on Ethernet."""
