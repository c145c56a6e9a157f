"""Machines that a run is compiled for, and need not be there."""

import importlib.metadata
import importlib.util
import math
import re
from typing import Any, NamedTuple

from experiments.aiming import chips
from experiments.aiming.chips import Chip
from experiments.cli.errors import BadRequest
from experiments.study.network import Network
from syncalgos import checks

Device = Any  # jax.Device, which type checkers do not take for a type
KNOWN = [f"{name}:{chip}" for name, of in chips.PLATFORMS.items() for chip in of]
FORMS = (
    f"{', '.join(x for x in KNOWN if x.startswith('tpu'))} with a slice's chips, such "
    f"as tpu:v5e:16x16; {', '.join(x for x in KNOWN if x.startswith('cuda'))} with "
    "hosts x GPUs, such as cuda:h100:4x8; cpu, cpu:8"
)
"""The targets that `parse` takes, for a message."""


class Target(NamedTuple):
    """A machine.

    Attributes:
        text: the target's name, such as "tpu:v5e:16x16"; the number of slices apart.
        platform: "tpu", "cuda" or "cpu".
        chip: of which it is made.
        shape: the grid of a slice's chips; of cuda (hosts, GPUs of each); of cpu (n,).
        slices: of a TPU; 1 elsewhere.
        inside: link within a slice or host; a chip's bandwidth each way.
        between: link between slices or hosts; a chip's share of it each way.
        sources: of the figures of the two links.
    """

    text: str
    platform: str
    chip: Chip
    shape: tuple[int, ...]
    slices: int
    inside: Network
    between: Network
    sources: tuple[str, ...]

    @property
    def chips(self) -> int:
        """The number of chips, of all slices."""
        return self.slices * math.prod(self.shape)


def parse(text: str, slices: int = 1) -> Target:
    """Returns the target with this name.

    Args:
        text: such as "tpu:v5e:16x16", a slice's chips; "cuda:h100:4x8", hosts x GPUs;
            "cpu" or "cpu:8", virtual devices.
        slices: TPU slices of this shape, joined by the data-centre network.

    Raises:
        ValueError: an unknown target or a shape that no slice or host has.
    """
    name = text.strip().lower()
    platform, _, rest = name.partition(":")
    slices = checks.whole("--slices", slices, least=1)
    if slices > 1 and platform != "tpu":
        raise ValueError(f"--slices: only TPUs have slices, got target {text!r}")
    if platform == "cpu":
        if not re.fullmatch(r"([1-9]\d{0,3})?", rest):
            raise ValueError(
                f"target {checks.shown(text)}: say cpu, or cpu:N with a number of "
                "devices from 1 to 9999"
            )
        kind, shape = chips.CPU, (int(rest or 1),)
        name = f"cpu:{shape[0]}"
    else:
        chip, _, grid = rest.partition(":")
        kind = chips.PLATFORMS.get(platform, {}).get(chip)
        if kind is None:
            hint = checks.nearest(f"{platform}:{chip}", KNOWN) or _with_platform(name)
            raise ValueError(
                f"unknown target {checks.shown(text)}{hint} (known: {FORMS})"
            )
        if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", grid):
            raise ValueError(
                f"target {checks.shown(text)}: its shape must be numbers with x "
                f"between them, such as {platform}:{chip}:{kind.example}"
            )
        shape = tuple(int(n) for n in grid.split("x"))
        if why := _impossible(platform, kind, shape):
            raise ValueError(f"target {name!r}: {why}")
    links = kind.inside, kind.between, kind.sources
    return Target(name, platform, kind.chip, shape, slices, *links)


def _with_platform(name: str) -> str:
    """Suggests the target of a chip that is named without its platform."""
    of_chip = {x.partition(":")[2]: x for x in KNOWN}
    hints = [x for part, x in of_chip.items() if part in name.split(":")]
    return f"; did you mean {hints[0]!r}?" if hints else ""


def _impossible(platform: str, kind: chips.Kind, shape: tuple[int, ...]) -> str | None:
    """Returns why there are no slices or hosts of this shape, if there are none."""
    axes = kind.example.count("x") + 1
    if len(shape) != axes:
        return f"{kind.chip.name} takes {axes} numbers, such as {kind.example}"
    if platform == "cuda" and shape[1] > kind.most:
        return f"a host has at most {kind.most} GPUs, got {shape[1]}"
    count = math.prod(shape)
    if platform == "tpu" and count > kind.most:
        return f"a slice has at most {kind.most} chips, got {count}; see --slices"
    # A host holds 2 x 2 chips of a slice, or its only chip.
    if platform == "tpu" and count > 1 and any(n % 2 for n in shape[:2]):
        return "the first two numbers must be even, as hosts hold 2x2"
    return None


_MISSING = {
    "tpu": ("libtpu", "tpu-compiler"),
    "cuda": ("jax_cuda13_plugin", "gpu-compiler"),
}
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2"}
_ENVIRONMENT = {
    "tpu": {
        "TPU_SKIP_MDS_QUERY": "1",  # no metadata server is asked
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no lock file: no TPU is opened
        # Without these libtpu complains on stderr. They change no topology.
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_LOG_DIR": "disabled",
    },
    # Else the plug-in looks for libraries that only running a program needs.
    "cuda": {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"},
}


def environment(target: Target) -> dict[str, str]:
    """Returns the environment variables to set before jax is imported.

    No device but CPUs is opened, on machines that have others too.
    """
    count = str(target.chips) if target.platform == "cpu" else "1"
    known = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": count}
    return _QUIET | known | _ENVIRONMENT.get(target.platform, {})


def check_compiler(target: Target) -> None:
    """Raises a BadRequest if the target's compiler is not installed."""
    if target.platform not in _MISSING:
        return
    module, extra = _MISSING[target.platform]
    if importlib.util.find_spec(module) is None:
        raise BadRequest(
            f"target {target.text!r}: its compiler is not installed: pip install -e "
            f"'.[experiments,{extra}]'"
        )


def compiler_version(target: Target) -> dict[str, str]:
    """Returns the version of the target's compiler by its package's name."""
    if target.platform not in _MISSING:
        return {}
    package = _MISSING[target.platform][0].replace("_", "-")
    return {package: importlib.metadata.version(package)}


def devices(target: Target) -> tuple[Device, ...]:
    """Returns the target's devices, those of a slice or host next to each other.

    Within a slice, those of a host are next to each other too, as workers of several
    hosts need.

    Raises:
        BadRequest: a compiler that refuses the shape, or too few virtual devices.
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
        first = str(error).partition("\n")[0]
        raise BadRequest(
            f"target {target.text!r}: the compiler says: {first}"
        ) from error
    # Those of a slice, and then of a host, follow one another.
    return tuple(sorted(unordered, key=lambda x: (place_of(x), x.process_index, x.id)))


def _topology(target: Target) -> dict:
    """The arguments of jax's `get_topology_desc`."""
    if target.platform == "cuda":
        hosts, each = target.shape
        return {
            "platform": "cuda",
            "topology_name": target.chip.name,
            "topology": f"1x{hosts}x{each}",
            "target_config": chips.PLATFORMS["cuda"][target.chip.name].description,
        }
    grid = "x".join(map(str, target.shape))
    asked: dict = {"platform": "tpu", "topology_name": f"{target.chip.name}:{grid}"}
    if target.slices > 1:
        asked["num_slices"] = target.slices
    if target.chip.name == "v4":  # a chip is one device, as jax has it on Cloud TPUs
        asked["chip_config_name"] = "megacore"
    return asked


def place_of(device: Device) -> int:
    """Returns the number of a device's slice (TPU) or host (others).

    Devices of one place talk over the target's link `inside`, others over `between`.
    """
    if device.platform == "tpu":
        return getattr(device, "slice_index", None) or 0
    return device.process_index
