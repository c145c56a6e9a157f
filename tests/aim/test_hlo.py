"""The collectives of compiled programs, in each form that a compiler writes."""

import textwrap
from fractions import Fraction
from typing import NamedTuple

import pytest

from experiments.aim import hlo


def program(
    body, head="HloModule m, is_scheduled=true, num_partitions=8", computations=""
):
    """The text of a program whose first computation has these lines."""
    lines = textwrap.indent(textwrap.dedent(body).strip(), "  ")
    main = f"ENTRY %main (p: f32[4]) -> f32[4] {{\n{lines}\n}}\n"
    return f"{head}\n{textwrap.dedent(computations)}\n{main}"


def find_only(text):
    """The one collective of a program."""
    [collective] = hlo.find_collectives(text)
    return collective


# Of a jax program on virtual CPU devices.
ALL_REDUCE = """
    %a = f32[256,128]{1,0} parameter(0)
    %b = bf16[64]{0} parameter(1)
    %all-reduce.1 = (f32[256,128]{1,0}, bf16[64]{0}) all-reduce(%a, %b), channel_id=1, \
replica_groups=[2,4]<=[8], use_global_device_ids=true, to_apply=%add, \
metadata={op_name="jit(f)/while/body/psum"}
"""


def test_all_reduce_of_several_arrays():
    collective = find_only(program(ALL_REDUCE))
    size = 256 * 128 * 4 + 64 * 2
    assert collective.kind == "all_reduce"
    assert collective.bytes == Fraction(2 * 3, 4) * size
    assert collective.groups == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert collective.dtypes == ("f32", "bf16")
    assert (
        not collective.overlapped
        and not collective.is_looped
        and not collective.choices
    )


class RingCase(NamedTuple):
    """An instruction, and the part of its bytes that a device sends."""

    line: str
    kind: str
    size: int
    part: float


@pytest.mark.parametrize(
    RingCase._fields,
    [
        RingCase(
            line="f32[40] all-gather(%p), dimensions={0}",
            kind="all_gather",
            size=16,
            part=7,
        ),
        RingCase(
            line="f32[1] reduce-scatter(%q), to_apply=%add",
            kind="reduce_scatter",
            size=32,
            part=7 / 8,
        ),
        RingCase(
            line="f32[8] all-to-all(%q), dimensions={0}",
            kind="all_to_all",
            size=32,
            part=7 / 8,
        ),
        RingCase(
            line="f32[4] all-reduce(%p), to_apply=%add",
            kind="all_reduce",
            size=16,
            part=14 / 8,
        ),
        # Operands may be written with their types.
        RingCase(
            line="f32[4]{0:T(8,128)} all-reduce(f32[4]{0:T(8,128)} %p)",
            kind="all_reduce",
            size=16,
            part=14 / 8,
        ),
    ],
)
def test_bytes_are_those_of_rings(line, kind, size, part):
    collective = find_only(
        program(f"""
        %p = f32[4]{{0}} parameter(0)
        %q = f32[8]{{0}} parameter(1)
        %x = {line}, channel_id=1, replica_groups={{}}
        """)
    )
    assert (collective.kind, collective.bytes) == (kind, part * size)
    assert collective.groups == [[0, 1, 2, 3, 4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ("{{0,2},{1,3}}", [[0, 2], [1, 3]]),
        ("[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("[4,2]<=[2,4]T(1,0)", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("[2,4]<=[2,2,2]T(1,0,2)", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("mesh['a'=4,'b'=2] {'a'}", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("mesh['a'=2,'b'=2,'c'=2] {'a','c'}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("{}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
    ],
)
def test_groups(written, groups):
    assert hlo.groups(f"%x), replica_groups={written}, to_apply=%a", 8) == groups


@pytest.mark.parametrize(
    ("written", "bytes_"),
    [
        ("f32[2,3]{1,0:T(8,128)S(1)}", 24),
        ("(f32[2], /*index=1*/bf16[2], u32[])", 16),
        ("pred[5]", 5),
        ("s4[3]", 2),
        ("f8e4m3fn[7]", 7),
        ("token[]", 0),
        ("f32[<=8]", 32),
    ],
)
def test_sizes(written, bytes_):
    assert hlo.count_type_bytes(written) == bytes_


# Of a TPU: a permutation that goes on in the background.
PERMUTE = """
    %p = f32[4]{0} parameter(0)
    %start = (f32[4]{0:T(128)S(1)}, f32[4]{0:T(128)}, u32[]{:S(2)}, u32[]{:S(2)}) \
collective-permute-start(%p), channel_id=1, source_target_pairs={{1,0},{2,1},{0,2}}
    %copy-start = (f32[4]{0}, f32[4]{0}, u32[]) copy-start(%p)
    WORK
    %done = f32[4]{0} collective-permute-done(%start)
"""


@pytest.mark.parametrize(
    ("work", "overlapped"),
    [
        ("%g = u32[]{:S(2)} get-tuple-element(%start), index=2", False),
        ("%f = f32[4]{0} fusion(%p), kind=kLoop, calls=%nothing", True),
    ],
)
def test_permute_overlaps_if_something_is_computed_until_it_is_done(work, overlapped):
    collective = find_only(program(PERMUTE.replace("WORK", work)))
    assert collective.kind == "permute"
    assert collective.groups == [[1, 0], [2, 1], [0, 2]]
    assert collective.bytes == 16
    assert collective.overlapped == overlapped


# Of an H100.
GPU = """
    %p = bf16[16,64]{1,0} parameter(0)
    %q = f32[8]{0} parameter(1)
    %rs = ((bf16[16,64]{1,0}, f32[8]{0}), (bf16[2,64]{1,0}, f32[1]{0})) \
reduce-scatter-start(%p, %q), channel_id=5, replica_groups=[1,8]<=[8], \
use_global_device_ids=true, dimensions={0}, to_apply=%add, \
backend_config={"collective_backend_config":{"is_sync":SYNC,"is_pipelined":false}}
    %f = f32[4]{0} fusion(%p), kind=kLoop, calls=%nothing
    %done = (bf16[2,64]{1,0}, f32[1]{0}) reduce-scatter-done(%rs)
"""


@pytest.mark.parametrize("is_sync", [False, True])
def test_gpu_start_overlaps_unless_its_stream_waits(is_sync):
    collective = find_only(program(GPU.replace("SYNC", str(is_sync).lower())))
    assert collective.kind == "reduce_scatter"
    assert collective.bytes == Fraction(7, 8) * (16 * 64 * 2 + 32)
    assert collective.overlapped != is_sync


# Of a TPU: the gather begins in one fusion, goes on in a second, which multiplies
# matrices, and ends in a third; each holds it.
FUSED = """
%begin (p: bf16[8,64]) -> (bf16[8,64], bf16[8,256]) {
  %p = bf16[8,64]{1,0} parameter(0)
  %all-gather.1 = bf16[8,256]{1,0} all-gather(%p), channel_id=24, \
replica_groups=[2,4]<=[8], dimensions={1}, \
backend_config={"async_collective_fusion_config":{"flag_start":"-1","flag_end":"-1"}}
  ROOT %s = (bf16[8,64]{1,0}, bf16[8,256]{1,0}) custom-call(%all-gather.1), \
custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.1 (p: bf16[8,64]) -> f32[4] {
  %p = bf16[8,64]{1,0} parameter(0)
  %all-gather.2 = bf16[8,256]{1,0} all-gather(%p), channel_id=24, \
replica_groups=[2,4]<=[8], dimensions={1}, \
backend_config={"async_collective_fusion_config":{"flag_start":"2","flag_end":"8"}}
  ROOT %c = f32[4]{0} convolution(%p, %p)
}

%end (p: bf16[8,64]) -> bf16[8,256] {
  %p = bf16[8,64]{1,0} parameter(0)
  %all-gather.3 = bf16[8,256]{1,0} all-gather(%p), channel_id=24, \
replica_groups=[2,4]<=[8], dimensions={1}, \
backend_config={"async_collective_fusion_config":{"flag_start":"2","flag_end":"8"}}
  ROOT %d = bf16[8,256]{1,0} custom-call(%p, %all-gather.3), \
custom_call_target="AsyncCollectiveDone"
}
"""


# Of a TPU: it reduces, and each chip keeps its quarter.
SCATTERED = """
%all-reduce-scatter.3 (p: f32[256,64]) -> f32[64,64] {
  %p = f32[256,64]{1,0} parameter(0)
  %all-reduce.4 = f32[256,64]{1,0} all-reduce(%p), channel_id=7, \
replica_groups=[2,4]<=[8], to_apply=%add
  ROOT %cut = f32[64,64]{1,0} dynamic-slice(%all-reduce.4), \
dynamic_slice_sizes={64,64}
}
"""


WRAPPED = """
%wrapped (w: f32[8]) -> f32[8] {
  %w = f32[8]{0} parameter(0)
  ROOT %a = f32[8]{0} all-to-all(%w), channel_id=1, replica_groups={{0,1}}
}
"""
# Its operands alone count.
GATHERED = """
    %p = f32[2,64]{1,0} parameter(0)
    %q = s32[2]{0} parameter(1)
    %start = ((f32[2,64]{1,0}, s32[2]{0}), (f32[16,64]{1,0}, s32[16]{0})) \
all-gather-start(%p, %q), channel_id=1, replica_groups=[1,8]<=[8], dimensions={0}
    %done = (f32[16,64]{1,0}, s32[16]{0}) all-gather-done(%start)
"""
IN_THE_BACKGROUND = """
    %p = f32[8]{0} parameter(0)
    %start = ((f32[8]{0}), f32[8]{0}) async-start(%p), calls=%wrapped
    %f = f32[8]{0} fusion(%p), kind=kLoop, calls=%nothing
    %done = f32[8]{0} async-done(%start)
"""
OVER_FUSIONS = """
    %p = bf16[8,64]{1,0} parameter(0)
    %start = (bf16[8,64]{1,0}, bf16[8,256]{1,0}) fusion(%p), calls=%begin
    %f = f32[4]{0} fusion(%p), calls=%async_collective_fusion.1
    %done = bf16[8,256]{1,0} fusion(%p), kind=kCustom, calls=%end
"""
AND_SLICED = """
    %p = f32[256,64]{1,0} parameter(0)
    %x = f32[64,64]{1,0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.3
"""


class FormCase(NamedTuple):
    """A program with one collective in some form."""

    body: str
    computations: str
    kind: str
    size: float
    overlapped: bool


@pytest.mark.parametrize(
    FormCase._fields,
    [
        FormCase(
            body=GATHERED,
            computations="",
            kind="all_gather",
            size=7 * (2 * 64 * 4 + 2 * 4),
            overlapped=False,
        ),
        FormCase(
            body=IN_THE_BACKGROUND,
            computations=WRAPPED,
            kind="all_to_all",
            size=16,
            overlapped=True,
        ),
        FormCase(
            body=OVER_FUSIONS,
            computations=FUSED,
            kind="all_gather",
            size=3 * 8 * 64 * 2,
            overlapped=True,
        ),
        FormCase(
            body=AND_SLICED,
            computations=SCATTERED,
            kind="reduce_scatter",
            size=3 / 4 * 256 * 64 * 4,
            overlapped=False,
        ),
    ],
    ids=["gathered", "in the background", "over fusions", "reduced and sliced"],
)
def test_a_collective_is_one_however_it_is_written(
    body, computations, kind, size, overlapped
):
    collective = find_only(program(body, computations=computations))
    assert (collective.kind, collective.bytes, collective.overlapped) == (
        kind,
        size,
        overlapped,
    )


# Of TPU slices: what a program of one slice hands to its host for the others.
SLICES = """
    %p = f32[16,8,128]{2,1,0} parameter(0)
    %after-all = token[] after-all()
    %send = (f32[16,8,128]{2,1,0:T(8,128)}, u32[], token[]) send(%p, %after-all), \
channel_id=2, is_host_transfer=true, frontend_attributes={\
_xla_host_transfer_handler_name="xla_megascale_runtime",\
_xla_host_transfer_rendezvous="all-reduce_0",_xla_megascale_target=TARGET,\
_xla_megascale_transfer_type="TYPE"}
    %recv = (f32[16,8,128]{2,1,0:T(8,128)}, u32[], token[]) recv(%after-all), \
channel_id=1, is_host_transfer=true, frontend_attributes={\
_xla_host_transfer_rendezvous="all-reduce_0",_xla_megascale_target=TARGET,\
_xla_megascale_transfer_type="TYPE"}
    WORK
    %send-done = token[] send-done(%send), channel_id=2, is_host_transfer=true
    %recv-done = (f32[16,8,128]{2,1,0}, token[]) recv-done(%recv), channel_id=1
    %late = f32[4]{0} fusion(%p), kind=kLoop, calls=%nothing
"""


def between_slices(target, kind, work=""):
    text = SLICES.replace("TARGET", target).replace("TYPE", kind)
    return find_only(program(text.replace("WORK", work)))


class TransferCase(NamedTuple):
    """A transfer between slices, and the part of its bytes that is sent."""

    target: str
    type_: str
    kind: str
    groups: list[list[int]]
    part: float | Fraction


@pytest.mark.parametrize(
    TransferCase._fields,
    [
        TransferCase(
            target='"{1,2,3}x{0:1}"',
            type_="ALL_REDUCE",
            kind="all_reduce",
            groups=[[100000, 200000, 300000], [100001, 200001, 300001]],
            part=Fraction(4, 3),
        ),
        TransferCase(
            target='"{1,2}x{0:1,5}"',
            type_="ALL_GATHER",
            kind="all_gather",
            groups=[[100000, 200000], [100001, 200001], [100005, 200005]],
            part=1,
        ),
        TransferCase(
            target="{{100000,100001,200000,200001}}",
            type_="ALL_TO_ALL",
            kind="all_to_all",
            groups=[[100000, 100001, 200000, 200001]],
            part=Fraction(3, 4),
        ),
        TransferCase(
            target="{{200000->100015},{100000->200015}}",
            type_="ONE_TO_ONE",
            kind="permute",
            groups=[[200000, 100015], [100000, 200015]],
            part=1,
        ),
    ],
)
def test_transfers_between_tpu_slices(target, type_, kind, groups, part):
    collective = between_slices(target, type_)
    assert collective.slices
    assert (collective.kind, collective.groups) == (kind, groups)
    assert collective.bytes == part * 16 * 8 * 128 * 4


@pytest.mark.parametrize(
    ("work", "overlapped"),
    [("", False), ("%f = f32[4]{0} fusion(%p), kind=kLoop, calls=%nothing", True)],
)
def test_transfer_between_slices_overlaps_until_it_has_arrived(work, overlapped):
    assert between_slices('"{1,2}x{0:1}"', "ALL_REDUCE", work).overlapped == overlapped


def test_unknown_transfer_between_slices_is_refused():
    with pytest.raises(ValueError, match="unknown transfer between slices 'GOSSIP'"):
        between_slices('"{1,2}x{0:1}"', "GOSSIP")
    with pytest.raises(ValueError, match="unknown target between slices"):
        between_slices('"everyone"', "ALL_REDUCE")


LOOPS = """
%layer (l: f32[4]) -> f32[4] {
  %l = f32[4]{0} parameter(0)
  %g = f32[8]{0} all-gather(%l), channel_id=1, replica_groups={{0,1}}, dimensions={0}
}

%layers_left (l: f32[4]) -> pred[] {
  %i = s32[] parameter(0)
  %n = s32[] constant(5)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

%sync (s: f32[4]) -> f32[4] {
  %s = f32[4]{0} parameter(0)
  %r = f32[4]{0} all-reduce(%s), channel_id=1, replica_groups={{0,2}}, to_apply=%add
}

%rest (s: f32[4]) -> f32[4] {
  %s = f32[4]{0} parameter(0)
}

%step (t: f32[4]) -> f32[4] {
  %t = f32[4]{0} parameter(0)
  %grads = f32[4]{0} all-reduce(%t), channel_id=1, replica_groups={{0,1}}, to_apply=%add
  %inner = f32[4]{0} while(%t), condition=%layers_left, body=%layer
  %c = f32[4]{0} conditional(%t, %t, %t), branch_computations={%rest, %sync}
}

%steps_left (t: f32[4]) -> pred[] {
  %i = s32[] parameter(0)
}
"""

WITH_LOOPS = """
    %p = f32[4]{0} parameter(0)
    %w = f32[4]{0} while(%p), condition=%steps_left, body=%step, \
backend_config={"known_trip_count":{"n":"8"}}
    %mean = f32[4]{0} all-reduce(%w), replica_groups={{0,1}}, to_apply=%add
"""


def test_loops_and_branches_say_how_often_a_collective_runs():
    collectives = hlo.find_collectives(program(WITH_LOOPS, computations=LOOPS))
    grads, gather, sync, mean = collectives
    assert [grads.times, gather.times, sync.times, mean.times] == [1, 5, 1, 1]
    assert [x.is_looped for x in collectives] == [True, True, True, False]
    assert sync.choices == (("c", "sync"),)
    assert not grads.choices and not gather.choices and not mean.choices


def test_gpu_branches_are_true_and_false():
    computations = LOOPS.replace(
        "branch_computations={%rest, %sync}",
        "true_computation=%sync, false_computation=%rest",
    )
    collectives = hlo.find_collectives(program(WITH_LOOPS, computations=computations))
    assert [x.choices for x in collectives][2] == (("c", "sync"),)


def test_a_loop_of_unknown_length_counts_once():
    collectives = hlo.find_collectives(
        program(WITH_LOOPS, computations=LOOPS.replace("direction=LT", "direction=NE"))
    )
    assert [x.times for x in collectives] == [1, 1, 1, 1]


def test_a_type_that_the_compiler_has_made_wider_is_noted():
    text = program(ALL_REDUCE.replace("to_apply=%add", "to_apply=%add.clone_promoted"))
    assert find_only(text).promoted
    assert not find_only(program(ALL_REDUCE)).promoted
    renamed_sum = ALL_REDUCE.replace("while/body/psum", "x_promoted")
    assert not find_only(program(renamed_sum)).promoted
