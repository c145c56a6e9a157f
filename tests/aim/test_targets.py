"""Machines that a run is compiled for."""

import importlib.util
import json

import pytest
from support.commands import OTHER_MACHINES, run_python

from experiments.aim import targets
from experiments.command.errors import BadRequest

no_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)

SHOW = """
import json, os, sys
from experiments.aim import targets
target = targets.parse_target(sys.argv[1], int(sys.argv[2]))
os.environ.update(targets.compiler_environment(target))
found = targets.devices(target)
rows = [[x.platform, targets.device_place(x), x.process_index] for x in found]
print(json.dumps(rows))
"""


def devices(text, slices=1):
    """The platform, place and process of each device, from a process of its own."""
    words = ["-c", SHOW, text, str(slices)]
    return json.loads(run_python(words, **OTHER_MACHINES)[0])


@pytest.mark.parametrize(
    ("text", "slices", "platform", "shape", "count"),
    [
        ("tpu:v5e:16x16", 1, "tpu", (16, 16), 256),
        ("tpu:v5e:4x8", 4, "tpu", (4, 8), 128),
        ("tpu:v5p:16x16x12", 1, "tpu", (16, 16, 12), 3072),
        (" TPU:v4:8x8x8 ", 1, "tpu", (8, 8, 8), 512),
        ("tpu:v6e:1x1", 1, "tpu", (1, 1), 1),
        ("cuda:h100:4x8", 1, "cuda", (4, 8), 32),
        ("cpu", 1, "cpu", (1,), 1),
        ("cpu:8", 1, "cpu", (8,), 8),
    ],
)
def test_target_has_so_many_chips(text, slices, platform, shape, count):
    target = targets.parse_target(text, slices)
    assert (target.platform, target.shape, target.slices) == (platform, shape, slices)
    assert target.chips == count
    assert target.text in (text.strip().lower(), "cpu:1")


def test_shares_of_the_network_add_up_to_a_pod_as_published():
    """Google Cloud: 6.4 (v5e) and 25.6 Tbit/s (v6e) for 256 chips, which make 50.63
    and 234.9 PFLOP/s in bfloat16; both figures are rounded."""
    for name, bits, flops in (("v5e", 6.4e12, 50.63e15), ("v6e", 25.6e12, 234.9e15)):
        chip = targets.CHIPS[f"tpu:{name}"]
        assert 256 * 8 * chip.between.bandwidth == bits
        assert chip.flops == pytest.approx(flops / 256, rel=0.005)


def test_rings_use_both_links_of_an_axis_of_the_torus():
    """Google Cloud: a v5e chip has 400 GB/s in both directions on 4 ports."""
    assert (
        targets.parse_target("tpu:v5e:4x4").chip.inside.bandwidth == 400e9 / 2 / 4 * 2
    )


def test_environment_opens_no_accelerator():
    for text in ("tpu:v5e:4x4", "cuda:h100:1x8", "cpu:4"):
        assert (
            targets.compiler_environment(targets.parse_target(text))["JAX_PLATFORMS"]
            == "cpu"
        )
    assert (
        targets.compiler_environment(targets.parse_target("cpu:4"))[
            "JAX_NUM_CPU_DEVICES"
        ]
        == "4"
    )


@pytest.mark.parametrize(
    ("text", "extra"),
    [("tpu:v5e:4x4", "tpu-compiler"), ("cuda:h100:1x8", "gpu-compiler")],
)
def test_missing_compiler_says_the_command(text, extra, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadRequest, match=r"^[^\n]+$") as caught:
        targets.check_compiler(targets.parse_target(text))
    assert f"pip install -e '.[experiments,{extra}]'" in str(caught.value)


def test_cpu_target_has_virtual_devices():
    assert devices("cpu:4") == [["cpu", 0, 0]] * 4


@pytest.mark.slow
@no_libtpu
def test_devices_of_a_slice_and_of_a_host_are_together():
    placed_devices = devices("tpu:v5e:4x4", slices=2)
    assert [place for _, place, _ in placed_devices] == [0] * 16 + [1] * 16
    assert [process for *_, process in placed_devices] == [i // 4 for i in range(32)]


@pytest.mark.slow
@no_libtpu
@pytest.mark.parametrize("text", ["tpu:v4:2x2x2", "tpu:v5p:2x2x2"])
def test_a_chip_is_one_device(text):
    assert len(devices(text)) == 8
