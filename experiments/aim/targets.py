"""Machines that a run is compiled for, which need not be present, and their chips."""

import importlib.metadata
import importlib.util
import math
import re
import string
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from experiments.command.errors import BadRequest, error_text
from syncalgos import checks, network
from syncalgos.network import Network


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


def _make_chip(platform: str, name: str, figures: dict[str, Any]) -> Chip:
    """Returns a chip of the file, with the links of its platform."""
    platform_figures = PLATFORMS[platform]
    fields = {**figures}
    device = {"memory": fields["memory"], **fields.pop("device", {})}
    template = string.Template(platform_figures.get("description", ""))
    fields["description"] = template.substitute(device)
    fields["link_sources"] = tuple(fields.get("link_sources", [fields["source"]] * 2))
    for link in ("inside", "between"):
        link_figures = platform_figures[link]
        fields[link] = Network(
            f"{link_figures['name']} of {name}",
            bandwidth=fields[link],
            latency=link_figures["latency"],
            rings_only=link_figures.get("rings_only", False),
        )
    return Chip(platform, name, **fields)


# Each platform's compiler, environment, links and chips.
PLATFORMS: dict[str, Any] = tomllib.loads(
    Path(__file__).with_name("chips.toml").read_text("utf-8")
)
# Chips by platform and name: "tpu:v5e".
CHIPS: dict[str, Chip] = {}
for _platform, _platform_figures in PLATFORMS.items():
    for _name, _figures in _platform_figures["chips"].items():
        CHIPS[f"{_platform}:{_name}"] = _make_chip(_platform, _name, _figures)
# Virtual devices of one machine, in place of machines on Ethernet.
CPU = Chip(
    platform="cpu",
    name="cpu",
    memory=None,
    flops=None,
    source="no published figures: machines differ",
    inside=network.parse("10gbe"),
    between=network.parse("10gbe"),
    link_sources=(f"IEEE 802.3ae, {network.PRESETS['10gbe']}",) * 2,
)
Device = Any  # jax.Device, which type checkers do not take for a type
# The targets that `parse_target` accepts, for messages.
FORMS = (
    f"{', '.join(x for x in CHIPS if x.startswith('tpu'))} with a slice's chips, such "
    f"as tpu:v5e:16x16; {', '.join(x for x in CHIPS if x.startswith('cuda'))} with "
    "hosts x GPUs, such as cuda:h100:4x8; cpu, cpu:8"
)


class Target(NamedTuple):
    """A machine.

    Attributes:
        text: the target's name without the number of slices, such as "tpu:v5e:16x16".
        chip: the chip that it is made of.
        shape: the grid of a slice's chips; (hosts, GPUs per host) for cuda; (n,) for
            cpu.
        slices: number of TPU slices; 1 for others.
    """

    text: str
    chip: Chip
    shape: tuple[int, ...]
    slices: int

    @property
    def platform(self) -> str:
        """The platform: tpu, cuda or cpu."""
        return self.chip.platform

    @property
    def chips(self) -> int:
        """The number of chips in all slices."""
        return self.slices * math.prod(self.shape)

    @property
    def full_name(self) -> str:
        """The name with the number of slices, if there are several."""
        if self.slices > 1:
            return f"{self.text} × {self.slices} slices"
        return self.text


def parse_target(text: str, slices: int = 1) -> Target:
    """Returns the target with this name.

    Args:
        text: such as "tpu:v5e:16x16", a slice's chips; "cuda:h100:4x8", hosts x GPUs;
            "cpu" or "cpu:8", virtual devices.
        slices: TPU slices of this shape, joined by the data-centre network.

    Raises:
        ValueError: the target is unknown, or no slice or host has the shape.
    """
    name = text.strip().lower()
    platform, _, form = name.partition(":")
    slices = checks.whole("--slices", slices, least=1)
    if slices > 1 and platform != "tpu":
        raise ValueError(f"--slices: only TPUs have slices, got target {text!r}")
    if platform == "cpu":
        if not re.fullmatch(r"([1-9]\d{0,3})?", form):
            raise ValueError(
                f"target {checks.shown(text)}: give cpu, or cpu:N with a number of "
                "devices from 1 to 9999"
            )
        count = int(form or 1)
        return Target(f"cpu:{count}", CPU, (count,), 1)
    kind, _, grid = form.partition(":")
    chip = CHIPS.get(f"{platform}:{kind}")
    if chip is None:
        suggestion = checks.nearest(f"{platform}:{kind}", CHIPS)
        # A chip may be named without its platform.
        named_chips = [x for x in CHIPS if CHIPS[x].name in name.split(":")]
        if named_chips and not suggestion:
            suggestion = f"; did you mean {named_chips[0]!r}?"
        raise ValueError(
            f"unknown target {checks.shown(text)}{suggestion} (known: {FORMS})"
        )
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", grid):
        raise ValueError(
            f"target {checks.shown(text)}: the shape must be numbers with x between "
            f"them, such as {platform}:{kind}:{chip.example}"
        )
    shape = tuple(int(n) for n in grid.split("x"))
    reason = _find_impossible(chip, shape)
    if reason is not None:
        raise ValueError(f"target {checks.shown(text)}: {reason}")
    return Target(name, chip, shape, slices)


def _find_impossible(chip: Chip, shape: tuple[int, ...]) -> str | None:
    """Returns why no slice or host has this shape; None if one has."""
    axes = chip.example.count("x") + 1
    if len(shape) != axes:
        return f"{chip.name} takes {axes} numbers, such as {chip.example}"
    if chip.platform == "cuda":
        if shape[1] > chip.most:
            return f"a host has at most {chip.most} GPUs, got {shape[1]}"
        return None
    count = math.prod(shape)
    if count > chip.most:
        return f"a slice has at most {chip.most} chips, got {count}; see --slices"
    # A host holds 2 x 2 chips of a slice, or its only chip.
    if count > 1 and any(n % 2 for n in shape[:2]):
        return "the first two numbers must be even, because a host holds 2x2 chips"
    return None


def compiler_environment(target: Target) -> dict[str, str]:
    """Returns the environment variables to set before jax is imported.

    They keep jax from opening any devices except CPUs.
    """
    return {
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(target.chips) if target.platform == "cpu" else "1",
        **PLATFORMS[target.platform]["environment"],
    }


def check_compiler(target: Target) -> None:
    """Raises a BadRequest if the target's compiler is not installed."""
    compiler = PLATFORMS[target.platform].get("compiler")
    if compiler and importlib.util.find_spec(compiler["module"]) is None:
        raise BadRequest(
            f"--target {target.text}: its compiler is not installed: run pip install "
            f"-e '.[experiments,{compiler['extra']}]' in the checkout of syncalgos"
        )


def compiler_version(target: Target) -> dict[str, str]:
    """Returns the version of the target's compiler by its package's name."""
    compiler = PLATFORMS[target.platform].get("compiler")
    if compiler is None:
        return {}
    package = compiler["module"].replace("_", "-")
    return {package: importlib.metadata.version(package)}


def devices(target: Target) -> tuple[Device, ...]:
    """Returns the target's devices, ordered by slice or host.

    Within a slice they are ordered by host, as workers that span hosts require. The
    process needs the variables of `compiler_environment`.

    Raises:
        BadRequest: the compiler refuses the shape.
    """
    import jax
    from jax.experimental import topologies

    if target.platform == "cpu":
        return tuple(jax.devices("cpu")[: target.chips])
    try:
        unordered = topologies.get_topology_desc(**_topology(target)).devices
    except (jax.errors.JaxRuntimeError, RuntimeError) as error:
        reason = error_text(error).partition("\n")[0]
        raise BadRequest(
            f"target {target.text!r}: the compiler says: {reason}"
        ) from error
    return tuple(
        sorted(unordered, key=lambda x: (device_place(x), x.process_index, x.id))
    )


def _topology(target: Target) -> dict[str, Any]:
    """Returns the arguments of jax's `get_topology_desc`."""
    if target.platform == "cuda":
        hosts, host_gpus = target.shape
        return {
            "platform": "cuda",
            "topology_name": target.chip.name,
            "topology": f"1x{hosts}x{host_gpus}",
            "target_config": target.chip.description,
        }
    name = target.text.removeprefix("tpu:")
    arguments: dict[str, Any] = {"platform": "tpu", "topology_name": name}
    if target.slices > 1:
        arguments["num_slices"] = target.slices
    if target.chip.name == "v4":  # a chip is one device, as jax has it on Cloud TPUs
        arguments["chip_config_name"] = "megacore"
    return arguments


def device_place(device: Device) -> int:
    """Returns the number of a device's slice (TPU) or host (others).

    Devices in the same place use the target's link `inside`, others `between`.
    """
    if device.platform == "tpu":
        return getattr(device, "slice_index", None) or 0
    return device.process_index
