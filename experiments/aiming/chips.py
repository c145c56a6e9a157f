"""Published figures of chips and of the networks between them."""

from typing import NamedTuple

from experiments.study.network import PRESETS, Network, parse

GB, GIB = 10**9, 2**30


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
        axes: of a slice's grid.
    """

    chip: Chip
    inside: Network
    between: Network
    sources: tuple[str, str]
    most: int
    axes: int


# A hop between neighbours in a slice takes about a microsecond (Austin et al., "How to
# scale your model", 2025, part 3).
ICI_HOP = 1e-6
# Round trips of short messages in a data centre of Google stay below 50 us at the 99th
# percentile (Kumar et al., "Swift", SIGCOMM 2020); half of it is one way.
DCN_HOP = 25e-6
# As in NCCL's own cost model (src/graph/tuning.cc: hwLat, ring, simple protocol).
NVLINK_HOP, INFINIBAND_HOP = 3.4e-6, 14e-6


def _tpu(
    chip: Chip,
    link: float,
    dcn: float,
    most: int,
    sources: tuple[str, str] | None = None,
) -> Kind:
    """A TPU.

    Args:
        link: bytes per second of one link in one direction. A ring along one axis of
            the torus sends both ways round, by two links; a group that covers several
            axes may reach as many times that, and an axis that does not close half.
        dcn: bytes per second of a chip's share of its host's network, each way.
        most: chips of the largest slice.
        sources: of link and dcn; None: the chip's own page.
    """
    inside = Network(f"ICI of {chip.name}", 2 * link, ICI_HOP)
    between = Network(f"data-centre network of {chip.name}", dcn, DCN_HOP)
    axes = 2 if chip.name in ("v5e", "v6e") else 3
    sources = sources or (chip.source, chip.source)
    return Kind(chip, inside, between, sources, most, axes)


def _gpu(chip: Chip, nvlink: float, infiniband: float, sources: tuple[str, str]):
    """A GPU, eight to a host: bytes per second of its links, each way."""
    inside = Network(f"NVLink of {chip.name}", nvlink, NVLINK_HOP)
    between = Network(f"InfiniBand of {chip.name}", infiniband, INFINIBAND_HOP)
    return Kind(chip, inside, between, sources, 8, 2)


def _docs(name: str, year: int) -> str:
    return f"Google Cloud, TPU {name} (cloud.google.com/tpu/docs/{name}), {year}"


def _of_xla(name: str) -> str:
    """The memory that the driver reports, as XLA has it for compiling ahead."""
    return f"openxla/xla, xla/backends/gpu/target_config/specs/{name}.txtpb, 2026"


# v5e, v6e: 256 chips share 6.4 and 25.6 Tbit/s of the data-centre network; v5p: 50
# Gbit/s a chip; all by the chips' own pages. ICI: 400 GB/s a chip in both directions on
# 4 ports (v5e), 3200 Gbit/s each way on 4 ports (v6e), 1200 GB/s in both directions on
# 6 ports (v5p). v4: 6 links of 50 GB/s (Jouppi et al., "TPU v4", ISCA 2023, table 4);
# its network is 25 GB/s a host of 4 chips (Austin et al., "How to scale your model",
# 2025, part 2). Its page has 275 TFLOP/s and 32 GiB.
_TPUS = (
    _tpu(
        Chip("v4", 32 * GIB, 275e12, _docs("v4", 2025)),
        50e9,
        6.25e9,
        4096,
        (
            "Jouppi et al., TPU v4, ISCA 2023",
            "Austin et al., How to scale your model, 2025",
        ),
    ),
    _tpu(Chip("v5e", 16 * GIB, 197e12, _docs("v5e", 2025)), 50e9, 3.125e9, 256),
    _tpu(Chip("v5p", 95 * GIB, 459e12, _docs("v5p", 2026)), 100e9, 6.25e9, 6144),
    _tpu(Chip("v6e", 32 * GIB, 918e12, _docs("v6e", 2026)), 100e9, 12.5e9, 256),
)
TPUS = {kind.chip.name: kind for kind in _TPUS}

# Peaks without sparsity, of the SXM modules. NVLink in both directions is 600 GB/s
# (A100), 900 GB/s (H100, H200) and 1.8 TB/s (B200). A host is a DGX: one InfiniBand
# adapter for each GPU, of 200 Gbit/s (A100) or 400 Gbit/s.
GPUS = {
    "a100": _gpu(
        Chip(
            "a100",
            85_100_068_864,
            312e12,
            f"NVIDIA A100 data sheet, 2021; {_of_xla('a100_sxm_80')}",
        ),
        300e9,
        25e9,
        ("NVIDIA A100 data sheet, 2021", "NVIDIA DGX A100 data sheet, 2021"),
    ),
    "h100": _gpu(
        Chip(
            "h100",
            84_942_979_072,
            989.4e12,
            "NVIDIA H100 Tensor Core GPU architecture, 2022; " + _of_xla("h100_sxm"),
        ),
        450e9,
        50e9,
        (
            "NVIDIA H100 Tensor Core GPU architecture, 2022",
            "NVIDIA DGX H100 data sheet, 2022",
        ),
    ),
    "h200": _gpu(
        Chip(
            "h200",
            151_397_597_184,
            989.4e12,
            f"NVIDIA H200 data sheet, 2023; {_of_xla('h200')}",
        ),
        450e9,
        50e9,
        ("NVIDIA H200 data sheet, 2023", "NVIDIA DGX H200 data sheet, 2024"),
    ),
    "b200": _gpu(
        Chip(
            "b200",
            191_514_411_008,
            2250e12,
            f"NVIDIA Blackwell architecture, 2024; {_of_xla('b200')}",
        ),
        900e9,
        50e9,
        (
            "NVIDIA Blackwell architecture, 2024",
            "NVIDIA DGX B200 data sheet, 2024",
        ),
    ),
}

CPU = Kind(
    Chip("cpu", None, None, "no published figures: machines differ"),
    parse("10gbe"),
    parse("10gbe"),
    (f"IEEE 802.3ae, {PRESETS['10gbe']}", f"IEEE 802.3ae, {PRESETS['10gbe']}"),
    4096,
    1,
)
"""Virtual devices of one machine, in place of machines on Ethernet."""


def _config(
    chip: Chip,
    name: str,
    capability: int,
    cores: int,
    fpus: int,
    shared: tuple[int, int],
    bandwidth: int,
    cache: int,
    clock: float,
) -> str:
    """The description of a GPU by which XLA compiles without it, a text proto."""
    extended = "" if capability < 9 else "feature_extension: ACCELERATED_FEATURES"
    return f"""
        gpu_device_info {{
          cuda_compute_capability {{ major: {capability} {extended} }}
          threads_per_block_limit: 1024 threads_per_warp: 32
          shared_memory_per_block: 49152 shared_memory_per_core: {shared[0]}
          shared_memory_per_block_optin: {shared[1]}
          threads_per_core_limit: 2048 core_count: {cores} fpus_per_core: {fpus}
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
          block_dim_limit_z: 65535
          thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
          memory_bandwidth: {bandwidth} l2_cache_size: {cache}
          clock_rate_ghz: {clock} device_memory_size: {chip.memory}
          registers_per_core_limit: 65536 registers_per_block_limit: 65536
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
        device_description_str: "NVIDIA {name}"
    """


_AMPERE, _HOPPER = (167936, 166912), (233472, 232448)
# The figures of openxla/xla, xla/backends/gpu/target_config/specs, 2026.
CONFIGS = {
    "a100": _config(
        GPUS["a100"].chip,
        "A100-SXM4-80GB",
        8,
        108,
        64,
        _AMPERE,
        2039_040_000_000,
        41943040,
        1.41,
    ),
    "h100": _config(
        GPUS["h100"].chip,
        "H100 80GB HBM3",
        9,
        132,
        128,
        _HOPPER,
        3352_320_000_000,
        52428800,
        1.98,
    ),
    "h200": _config(
        GPUS["h200"].chip,
        "H200 141GB HBM3e",
        9,
        132,
        128,
        _HOPPER,
        4800_000_000_000,
        52428800,
        1.98,
    ),
    "b200": _config(
        GPUS["b200"].chip,
        "B200",
        10,
        148,
        128,
        _HOPPER,
        7672_320_000_000,
        132644864,
        1.965,
    ),
}
