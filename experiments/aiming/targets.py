"""Machines that a run is compiled for; they need not be present."""

import importlib.metadata
import importlib.util
import math
import re
from typing import Any, NamedTuple

from experiments.aiming.chips import CHIPS, CPU, PLATFORMS, Chip
from experiments.cli.errors import BadRequest, text_of
from syncalgos import checks

Device = Any  # jax.Device, which type checkers do not take for a type
FORMS = (
    f"{', '.join(x for x in CHIPS if x.startswith('tpu'))} with a slice's chips, such "
    f"as tpu:v5e:16x16; {', '.join(x for x in CHIPS if x.startswith('cuda'))} with "
    "hosts x GPUs, such as cuda:h100:4x8; cpu, cpu:8"
)
"""The targets that `parse` accepts, for messages."""


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
    def shown(self) -> str:
        """The name with the number of slices, if there are several."""
        return self.text + (f" × {self.slices} slices" if self.slices > 1 else "")


def parse(text: str, slices: int = 1) -> Target:
    """Returns the target with this name.

    Args:
        text: such as "tpu:v5e:16x16", a slice's chips; "cuda:h100:4x8", hosts x GPUs;
            "cpu" or "cpu:8", virtual devices.
        slices: TPU slices of this shape, joined by the data-centre network.

    Raises:
        ValueError: the target is unknown, or no slice or host has the shape.
    """
    name, said = text.strip().lower(), f"target {checks.shown(text)}"
    platform, _, rest = name.partition(":")
    slices = checks.whole("--slices", slices, least=1)
    if slices > 1 and platform != "tpu":
        raise ValueError(f"--slices: only TPUs have slices, got target {text!r}")
    if platform == "cpu":
        if not re.fullmatch(r"([1-9]\d{0,3})?", rest):
            raise ValueError(
                f"{said}: give cpu, or cpu:N with a number of devices from 1 to 9999"
            )
        count = int(rest or 1)
        return Target(f"cpu:{count}", CPU, (count,), 1)
    kind, _, grid = rest.partition(":")
    chip = CHIPS.get(f"{platform}:{kind}")
    if chip is None:
        # A chip may be named without its platform.
        whole = [x for x in CHIPS if CHIPS[x].name in name.split(":")]
        hint = checks.nearest(f"{platform}:{kind}", CHIPS)
        hint = hint or "".join(f"; did you mean {x!r}?" for x in whole[:1])
        raise ValueError(f"unknown {said}{hint} (known: {FORMS})")
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", grid):
        raise ValueError(
            f"{said}: the shape must be numbers with x between them, such as "
            f"{platform}:{kind}:{chip.example}"
        )
    shape = tuple(int(n) for n in grid.split("x"))
    if why := _impossible(chip, shape):
        raise ValueError(f"{said}: {why}")
    return Target(name, chip, shape, slices)


def _impossible(chip: Chip, shape: tuple[int, ...]) -> str | None:
    """Returns why no slice or host has this shape; None if one has."""
    axes, count = chip.example.count("x") + 1, math.prod(shape)
    if len(shape) != axes:
        return f"{chip.name} takes {axes} numbers, such as {chip.example}"
    if chip.platform == "cuda":
        of_host = f"a host has at most {chip.most} GPUs, got {shape[1]}"
        return of_host if shape[1] > chip.most else None
    if count > chip.most:
        return f"a slice has at most {chip.most} chips, got {count}; see --slices"
    # A host holds 2 x 2 chips of a slice, or its only chip.
    if count > 1 and any(n % 2 for n in shape[:2]):
        return "the first two numbers must be even, because a host holds 2x2 chips"
    return None


def environment(target: Target) -> dict[str, str]:
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
    known = PLATFORMS[target.platform].get("compiler")
    if known and importlib.util.find_spec(known["module"]) is None:
        raise BadRequest(
            f"--target {target.text}: its compiler is not installed: pip install -e "
            f"'.[experiments,{known['extra']}]' in the checkout"
        )


def compiler_version(target: Target) -> dict[str, str]:
    """Returns the version of the target's compiler by its package's name."""
    if (known := PLATFORMS[target.platform].get("compiler")) is None:
        return {}
    package = known["module"].replace("_", "-")
    return {package: importlib.metadata.version(package)}


def devices(target: Target) -> tuple[Device, ...]:
    """Returns the target's devices, ordered by slice or host.

    Within a slice they are ordered by host, as workers that span hosts require.

    Raises:
        BadRequest: the compiler refuses the shape, or there are too few virtual
            devices.
    """
    import jax
    from jax.experimental import topologies

    if target.platform == "cpu":
        virtual = jax.devices("cpu")
        if len(virtual) < target.chips:
            raise BadRequest(
                f"target {target.text!r}: jax has {len(virtual)} CPU devices; set "
                f"JAX_NUM_CPU_DEVICES={target.chips} before it is imported"
            )
        return tuple(virtual[: target.chips])
    try:
        unordered = topologies.get_topology_desc(**_topology(target)).devices
    except (jax.errors.JaxRuntimeError, RuntimeError) as error:
        told = text_of(error).partition("\n")[0]
        raise BadRequest(
            f"target {target.text!r}: the compiler says: {told}"
        ) from error
    return tuple(sorted(unordered, key=lambda x: (place_of(x), x.process_index, x.id)))


def _topology(target: Target) -> dict:
    """Returns the arguments of jax's `get_topology_desc`."""
    if target.platform == "cuda":
        hosts, each = target.shape
        return {
            "platform": "cuda",
            "topology_name": target.chip.name,
            "topology": f"1x{hosts}x{each}",
            "target_config": target.chip.description,
        }
    name = target.text.removeprefix("tpu:")
    asked: dict = {"platform": "tpu", "topology_name": name}
    if target.slices > 1:
        asked["num_slices"] = target.slices
    if target.chip.name == "v4":  # a chip is one device, as jax has it on Cloud TPUs
        asked["chip_config_name"] = "megacore"
    return asked


def place_of(device: Device) -> int:
    """Returns the number of a device's slice (TPU) or host (others).

    Devices in the same place use the target's link `inside`, others `between`.
    """
    if device.platform == "tpu":
        return getattr(device, "slice_index", None) or 0
    return device.process_index
