"""Published figures of chips and of the networks between them, from chips.toml."""

import string
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from experiments.study.network import PRESETS, Network, parse


class Chip(NamedTuple):
    """A chip and its networks.

    Attributes:
        platform: "tpu", "cuda" or "cpu".
        name: its name in a target.
        memory: bytes of HBM; None without a published figure.
        flops: peak FLOP/s of dense bfloat16 products; None without a published figure.
        source: source of both figures, with the year.
        inside: the link within a slice or host; a chip's bandwidth each way.
        between: the link between slices or hosts; a chip's share of it each way.
        link_sources: sources of the figures of the two links.
        most: number of chips of the largest slice, or of GPUs of the largest host.
        example: an example of a shape: "4x4", or hosts x GPUs.
        description: a text proto that lets XLA compile for a GPU without having it.
    """

    platform: str
    name: str
    memory: int | None
    flops: float | None
    source: str
    inside: Network
    between: Network
    link_sources: tuple[str, ...]
    most: int = 0
    example: str = ""
    description: str = ""


def _chip(platform: str, name: str, figures: dict[str, Any]) -> Chip:
    """Returns a chip of the file, with the links of its platform."""
    of_all, plain = PLATFORMS[platform], {**figures}
    for link in ("inside", "between"):
        kind, latency = of_all[link]["name"], of_all[link]["latency"]
        plain[link] = Network(f"{kind} of {name}", figures[link], latency)
    description = string.Template(of_all.get("description", ""))
    named = {**plain.pop("device", {}), "memory": figures["memory"]}
    sources = plain.pop("link_sources", [figures["source"]] * 2)
    return Chip(
        platform,
        name,
        link_sources=tuple(sources),
        description=description.substitute(named),
        **plain,
    )


PLATFORMS: dict[str, Any] = tomllib.loads(
    Path(__file__).with_name("chips.toml").read_text("utf-8")
)
"""The content of chips.toml: each platform's compiler, environment, links and chips."""

CHIPS = {
    f"{platform}:{name}": _chip(platform, name, figures)
    for platform, of_all in PLATFORMS.items()
    for name, figures in of_all["chips"].items()
}
"""Chips by platform and name: "tpu:v5e"."""

CPU = Chip(
    *("cpu", "cpu", None, None, "no published figures: machines differ"),
    inside=parse("10gbe"),
    between=parse("10gbe"),
    link_sources=(f"IEEE 802.3ae, {PRESETS['10gbe']}",) * 2,
)
"""Virtual devices of one machine, in place of machines on Ethernet."""
