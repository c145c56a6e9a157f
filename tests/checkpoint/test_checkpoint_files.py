"""Files of checkpoints: real ones, real damage, real kills, a disk that is full."""

import copy
import errno
import hashlib
import io
import itertools
import json
import random
import re
import tempfile
import time
import zipfile
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.checkpoint.resume import Background, read_record
from experiments.checkpoint.shards import (
    DIGEST,
    FOREIGN,
    DamagedShard,
    Incomplete,
    Shard,
    ShardName,
    find_steps,
    load_workers,
    prune_shards,
    read_head,
    read_shard,
    remove_shards,
    write_shard,
)

NATIVE = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 "
NATIVE += "float64 complex64 complex128"
ODD_NAMES = ["", "a/b", "../up", ".params['w']/[0]", "ä\n\"'\\", "\ud800", "manifest"]


def bits(dtype, shape, seed=0):
    """An array of random bits: among floats NaNs of any payload."""
    dtype = FOREIGN.get(dtype) or np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    content = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    content = content % 2 if dtype.kind == "b" else content
    return content.view(dtype).reshape(shape)


def make_shard(step=32, workers=4, first_worker=0, count=None, size=3, **changes):
    """A part of a run in which every worker has other params, and all one center."""
    stop = workers if count is None else first_worker + count
    all_workers = Shard(
        step,
        workers,
        first_worker,
        {"w": bits("float32", (workers, size), step), "i": np.arange(workers)},
        {"center": bits("bfloat16", (2, size), step), "n": np.asarray(step)},
        {
            "run_id": "a",
            "start_id": "b",
            "settings": {"seed": 0},
            "first": first_worker,
        },
    )
    own_arrays = {name: x[first_worker:stop] for name, x in all_workers.own.items()}
    return all_workers._replace(own=own_arrays)._replace(**changes)


def assert_same(shard, expected):
    """All arrays have the same bits, and what is no array is equal."""
    assert shard._replace(own={}, shared={}) == expected._replace(own={}, shared={})
    for ours, theirs in ((shard.own, expected.own), (shard.shared, expected.shared)):
        assert list(ours) == list(theirs)
        for name, x in theirs.items():
            assert (ours[name].dtype, ours[name].shape) == (x.dtype, x.shape), name
            assert ours[name].tobytes() == x.tobytes(), name


def write_parts(folder, workers, num_parts, step=8, **changes):
    """Writes a checkpoint in parts of as many workers each; returns their files."""
    part_workers = workers // num_parts
    return [
        write_shard(
            folder,
            make_shard(step, workers, i * part_workers, part_workers, **changes),
            i,
            num_parts,
        )
        for i in range(num_parts)
    ]


def touched(folder, *layouts):
    """Makes empty files of checkpoints, of these steps in so many parts."""
    for step, num_parts in layouts:
        for number in range(num_parts):
            (folder / file_name(step, number, num_parts)).touch()


def names(folder):
    return sorted(x.name for x in folder.iterdir())


def file_name(step, number=0, num_parts=1):
    return ShardName(step, number, num_parts).file_name


def rows(first_worker, count=None):
    """A function that wants these workers, to the last one by default."""
    return lambda workers: range(
        first_worker, workers if count is None else first_worker + count
    )


def signed(content):
    """The content, with its SHA-256 at its end."""
    return content + hashlib.sha256(content).hexdigest().encode()


def refused(path):
    """The error for a Damaged shard: one line that names the file."""
    with pytest.raises(DamagedShard) as caught:
        read_shard(path)
    message = str(caught.value)
    assert message.startswith(f"{path.name} ")
    assert "\n" not in message
    assert str(path.parent) not in message
    return message


# What comes back


def leaves_of_all_kinds():
    """Leaves of three rows, by what is particular about them."""
    for dtype in (*NATIVE.split(), *FOREIGN):
        shapes = [(3,), (3, 2, 5), (3, 0), (3, 1, 1), (3, 7)]
        yield dtype, {str(shape): bits(dtype, shape) for shape in shapes}
    patterns = [0x80000000, 0x00000000, 0x7F800001, 0x7FC00001, 0xFFC12345, 0xFF800000]
    yield "NaNs", {"x": np.array(patterns, np.uint32).view(np.float32).reshape(3, 2)}
    yield "names", {name: np.full(3, i) for i, name in enumerate(ODD_NAMES)}
    x = np.arange(24, dtype=np.int16).reshape(8, 3)
    orders = {"transposed": x.T, "strided": x.T[:, ::2], "back": x.T[::-1]}
    yield "orders of memory", orders


KINDS = dict(leaves_of_all_kinds())


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_come_back_bit_for_bit(kind, tmp_path):
    arrays = KINDS[kind]
    shared = {**arrays, **{f"a row of {name}": x[1] for name, x in arrays.items()}}
    part = Shard(0, 3, 0, arrays, shared, {name: name for name in arrays})
    write_shard(tmp_path, part, 0, 1)
    loaded = load_workers(tmp_path, 0)
    assert_same(loaded, part)
    for x in (*loaded.own.values(), *loaded.shared.values()):
        assert x.flags.writeable
        assert x.flags.c_contiguous


def test_a_part_is_an_ordinary_npz(tmp_path):
    part = make_shard()
    path = write_shard(tmp_path, part, 0, 1)
    with np.load(path, allow_pickle=False) as arrays:
        manifest = json.loads(arrays["manifest"].tobytes())
        assert manifest["step"] == 32
        assert [x["name"] for x in manifest["own"]] == ["w", "i"]
        assert arrays["own/0"].tobytes() == part.own["w"].tobytes()
        assert manifest["shared"][0]["dtype"] == "bfloat16"
        assert arrays["shared/0"].dtype == np.uint16
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    assert write_shard(tmp_path, part, 0, 1).read_bytes() == path.read_bytes()


# Rows that are equal


def test_rows_that_are_equal_are_stored_once(tmp_path):
    row = bits("float32", 25_000)  # 100 kB, with NaNs
    x = np.broadcast_to(row, (256, 25_000))
    path = write_shard(
        tmp_path, Shard(1, 256, 0, {"x": x, "i": np.arange(256)}, {}, {}), 0, 1
    )
    assert path.stat().st_size < 120_000
    loaded_rows = load_workers(tmp_path, 1, rows(7, 3)).own["x"]
    assert loaded_rows.tobytes() == row.tobytes() * 3
    loaded_rows[0] = 0
    assert loaded_rows[1].tobytes() == row.tobytes()  # they share no memory


@pytest.mark.parametrize(
    ("dtype", "size"),  # rows of 1, 6, 12 and 64 bytes, and of several chunks
    [("bool", 1), ("bfloat16", 3), ("float32", 3), ("int64", 8), ("int64", 200_000)],
)
def test_one_other_bit_makes_rows_different(dtype, size, tmp_path):
    x = bits(dtype, (3, size))
    x[:] = x[0]
    write_shard(tmp_path, Shard(1, 3, 0, {"x": x}, {}, {}), 0, 1)
    with np.load(tmp_path / file_name(1)) as stored:
        assert stored["own/0"].shape == (1, size)
    for row in range(3):
        other = x.copy()
        other.view(np.uint8)[row, -1] ^= 1
        part = Shard(1, 3, 0, {"x": other}, {}, {})
        write_shard(tmp_path, part, 0, 1)
        assert_same(load_workers(tmp_path, 1), part)


# Other splits


@st.composite
def splits(draw):
    """Workers, how a run's processes hold them, and which are wanted."""
    workers = draw(st.integers(1, 9))
    cuts = draw(st.sets(st.integers(1, workers), max_size=4))
    first_worker = draw(st.integers(0, workers - 1))
    count = draw(st.none() | st.integers(1, workers - first_worker))
    return workers, sorted({0, workers, *cuts}), first_worker, count


@settings(deadline=None, max_examples=25)
@given(splits())
def test_any_rows_are_put_together_from_any_parts(split):
    workers, edges, first_worker, count = split
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        num_parts = len(edges) - 1
        for number, (a, b) in enumerate(pairwise(edges)):
            write_shard(folder, make_shard(8, workers, a, b - a), number, num_parts)
        loaded = load_workers(folder, 8, rows(first_worker, count))
    assert_same(
        loaded,
        make_shard(8, workers, first_worker, count)._replace(record=loaded.record),
    )
    assert loaded.record["first"] in edges


class ReadCase(NamedTuple):
    """Workers to load from so many parts, and the parts that are read."""

    num_parts: int
    first_worker: int
    num_read: int | None
    are_read: list[int]


@pytest.mark.parametrize(
    ReadCase._fields,
    [
        *(
            ReadCase(num_parts=4, first_worker=3 * i, num_read=3, are_read=[i])
            for i in range(4)
        ),  # of the same layout
        ReadCase(
            num_parts=6, first_worker=8, num_read=4, are_read=[2, 4, 5]
        ),  # of another: the first may be a wrong guess
        ReadCase(num_parts=12, first_worker=9, num_read=3, are_read=[3, 9, 10, 11]),
        ReadCase(num_parts=3, first_worker=0, num_read=None, are_read=[0, 1, 2]),
    ],
    ids=str,
)
def test_few_parts_are_read(num_parts, first_worker, num_read, are_read, tmp_path):
    if not Path("/proc/self/mem").is_file():
        pytest.skip("no file here raises an error when it is read")
    for i, path in enumerate(write_parts(tmp_path, 12, num_parts)):
        if i not in are_read:
            path.unlink()
            path.symlink_to("/proc/self/mem")
    loaded = load_workers(tmp_path, 8, rows(first_worker, num_read))
    assert_same(
        loaded, make_shard(8, 12, first_worker, num_read)._replace(record=loaded.record)
    )
    if len(are_read) < num_parts:
        with pytest.raises(OSError):
            load_workers(tmp_path, 8)


def test_damage_does_not_matter_where_other_parts_hold_the_rows(tmp_path):
    write_shard(tmp_path, make_shard(8, 8, 0, 7), 0, 2)
    damaged = write_shard(tmp_path, make_shard(8, 8, 7, 1), 1, 2)
    damaged.write_bytes(damaged.read_bytes()[1:])
    assert load_workers(tmp_path, 8, rows(4, 2)).own["i"].tolist() == [4, 5]
    with pytest.raises(DamagedShard, match=damaged.name):
        load_workers(tmp_path, 8, rows(6, 2))


def test_without_a_folder_there_are_no_checkpoints(tmp_path):
    assert find_steps(tmp_path / "none") == []
    prune_shards(tmp_path / "none", 3, 0, 1)
    with pytest.raises(Incomplete, match=r"^step-00000007 has no shard files$"):
        load_workers(tmp_path / "none", 7)


def test_steps_are_told_by_names_alone_the_newest_first(tmp_path):
    for step in (2, 123_456_789, 0, 30):
        (tmp_path / file_name(step, 1, 2)).touch()
    other_names = ["step-5.0-of-1.npz", file_name(5, "00"), file_name(5, 1, 1)]
    other_names += [
        f".{file_name(5)}",
        f"{file_name(5)}.bak",
        "step-٠٠٠٠٠٠٠٥.0-of-1.npz",
    ]
    for name in (file_name(30, 0, 2), *other_names):
        (tmp_path / name).touch()
    (tmp_path / file_name(5)).mkdir()
    assert find_steps(tmp_path) == [123_456_789, 30, 2, 0]


# What is missing


LACKING = {  # of six workers: (first, workers, number, of) of each part that is there
    "1-of-3.npz is missing": [(0, 2, 0, 3), (4, 2, 2, 3)],
    "2-of-3.npz is missing": [(0, 2, 0, 3), (2, 2, 1, 3)],
    "0-of-3.npz is missing, and 1 more of 3 files": [(2, 2, 1, 3)],
    # Too many to count.
    "1-of-999999999999.npz is missing, and 999999999997 more of 999999999999 files": [
        (0, 2, 0, 999999999999)
    ],
    "0-of-2.npz and the others lack some workers": [(0, 2, 0, 2), (3, 3, 1, 2)],
}


@pytest.mark.parametrize("missing_part", LACKING)
def test_what_is_missing_is_named(missing_part, tmp_path):
    for first_worker, count, *place in LACKING[missing_part]:
        write_shard(tmp_path, make_shard(8, 6, first_worker, count), *place)
        assert (
            load_workers(tmp_path, 8, rows(first_worker, count)).first == first_worker
        )
    with pytest.raises(Incomplete) as caught:
        load_workers(tmp_path, 8)
    assert str(caught.value) == f"step-00000008.{missing_part}"


def test_a_link_to_a_part_that_is_not_there_now_is_a_part(tmp_path):
    (tmp_path / file_name(8)).symlink_to(tmp_path / "not mounted")
    assert find_steps(tmp_path) == [8]
    (tmp_path / "folder").symlink_to(tmp_path / "not mounted")
    with pytest.raises(FileNotFoundError):
        find_steps(tmp_path / "folder")


def test_of_two_sets_of_a_step_one_that_is_complete_and_sound_is_taken(tmp_path):
    [single_part], second, third = (
        write_parts(tmp_path, 6, count, record={"of": count}) for count in (1, 2, 3)
    )
    content = single_part.read_bytes()
    assert load_workers(tmp_path, 8, rows(0, 2)).record == {"of": 1}
    for fault, num_parts in (
        (lambda: single_part.write_bytes(content[:-1]), 2),
        (second[1].unlink, 3),
        (third[2].unlink, 2),
    ):
        fault()
        assert load_workers(tmp_path, 8, rows(0, 2)).record == {"of": num_parts}
    with pytest.raises(DamagedShard, match=r"^step-00000008\.0-of-1\.npz is damaged"):
        load_workers(tmp_path, 8)
    single_part.write_bytes(content)
    assert_same(load_workers(tmp_path, 8), make_shard(8, 6, record={"of": 1}))


# Damage


def smallest(folder):
    return write_shard(folder, Shard(1, 2, 0, {"x": np.arange(2)}, {}, {}), 0, 1)


def flip(content, i):
    torn = bytearray(content)
    torn[i] ^= 1 << random.Random(i).randrange(8)
    return torn


TEARS = [flip, lambda content, i: content[:i], lambda content, i: content + content[:i]]


@pytest.mark.parametrize("tear", TEARS, ids=["flipped", "truncated", "appended"])
def test_damage_is_found_wherever_it_is(tear, tmp_path):
    path = smallest(tmp_path)
    sound = path.read_bytes()
    for i in range(len(sound)):
        torn = tear(sound, i)
        if torn != sound:
            path.write_bytes(torn)
            assert "damaged" in refused(path)
    path.write_bytes(sound)
    read_shard(path)


def test_a_flipped_bit_is_found_in_a_large_part(tmp_path):
    path = write_shard(tmp_path, make_shard(size=60_000), 0, 1)
    draw = random.Random(0)
    sound = path.read_bytes()
    assert len(sound) > 1_000_000
    for _ in range(20):
        torn = bytearray(sound)
        bit = draw.randrange(8 * len(sound))
        torn[bit // 8] ^= 1 << bit % 8
        path.write_bytes(torn)
        with pytest.raises(
            DamagedShard, match=r"^step-00000032\.0-of-1\.npz is damaged"
        ):
            load_workers(tmp_path, 32)


def test_a_folder_in_the_place_of_a_part_is_no_part(tmp_path):
    (tmp_path / file_name(8)).mkdir()
    with pytest.raises(Incomplete):
        load_workers(tmp_path, 8)
    with pytest.raises(IsADirectoryError):
        read_shard(tmp_path / file_name(8))
    prune_shards(tmp_path, 0, 0, 1)


@pytest.mark.parametrize("reads", [read_shard, read_head])
def test_a_disk_that_cannot_read_is_no_damage(reads, tmp_path, monkeypatch):
    def broken(file):
        raise OSError(errno.EIO, "Input/output error")

    path = smallest(tmp_path)
    monkeypatch.setattr(np, "load", broken)
    with pytest.raises(OSError, match="Input/output error"):
        reads(path)


def test_what_another_program_signed_raises_nothing_unforeseen(tmp_path):
    """As flipped bits, but with a sum that fits: all is left to the parsing."""
    path = smallest(tmp_path)
    num_damaged = 0
    sound = path.read_bytes()[:-DIGEST]
    for i in range(len(sound)):
        path.write_bytes(signed(flip(sound, i)))
        try:
            read_shard(path)
        except DamagedShard as error:
            assert "\n" not in str(error)
            num_damaged += 1
    assert num_damaged > len(sound) / 2


def altered(path, change):
    """Writes a part anew after a change of its entries and its manifest."""
    with np.load(path) as file:
        entries = dict(file)
    manifest = json.loads(entries.pop("manifest").tobytes())
    change(manifest, entries)
    text = entries.pop("manifest", json.dumps(manifest))
    entries["manifest"] = np.frombuffer(text.encode(), np.uint8)
    content = io.BytesIO()
    np.savez(content, allow_pickle=True, **entries)
    with zipfile.ZipFile(content, "a") as archive:
        archive.comment = b"-" * DIGEST
    path.write_bytes(signed(content.getvalue()[:-DIGEST]))


CHANGES = {
    "a newer format": lambda m, e: m.update(version=2),
    "an entry missing": lambda m, e: e.pop("own/1"),
    "an entry more": lambda m, e: e.update({"own/2": e["own/1"]}),
    "an entry of objects": lambda m, e: e.update({"own/1": e["own/1"].astype(object)}),
    "no step": lambda m, e: m.pop("step"),
    "no record": lambda m, e: m.pop("record"),
    "no leaves": lambda m, e: m.update(own=[]),
    "another shape": lambda m, e: m["own"][0].update(shape=[4, 4]),
    "another dtype": lambda m, e: m["own"][0].update(dtype="int32"),
    "dtype unknown": lambda m, e: m["own"][0].update(dtype="float9"),
    "stored once": lambda m, e: m["own"][0].update(once=True),
    "rows of another number": lambda m, e: e.update({"own/1": e["own/1"][:3]}),
    "fewer workers": lambda m, e: m.update(workers=3),
    "workers before the first": lambda m, e: m.update(first=-1),
    "workers no whole number": lambda m, e: m.update(workers=4.0),
    "a first worker that is true": lambda m, e: m.update(first=False),
    "a record that is a list": lambda m, e: m.update(record=[]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_manifest_that_does_not_fit_is_refused(change, tmp_path):
    path = write_shard(tmp_path, make_shard(), 0, 1)
    altered(path, lambda m, e: None)
    assert_same(load_workers(tmp_path, 32), make_shard())
    altered(path, CHANGES[change])
    message = refused(path)
    if change == "a newer format":
        assert message.endswith("its format is 2, but this version reads 1")


@pytest.mark.parametrize("reads", [read_shard, read_head])
def test_an_array_that_claims_more_than_its_file_is_damage(reads, tmp_path):
    path = write_shard(tmp_path, make_shard(), 0, 1)
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    for name, entry in entries.items():
        rows = re.search(rb"\((?:\d+,)?", entry)
        assert rows
        claimed = entry.replace(rows[0], b"(4000000000000,", 1)
        # The header keeps its size: it ends in spaces.
        longer = len(claimed) - len(entry)
        claimed = claimed.replace(b" " * longer + b"\n", b"\n", 1)
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w") as archive:
            for entry_name, data in (entries | {name: claimed}).items():
                archive.writestr(entry_name, data)
            archive.comment = b"-" * DIGEST
        path.write_bytes(signed(content.getvalue()[:-DIGEST]))
        with pytest.raises(DamagedShard, match=f"'{name}' has another size"):
            reads(path)


def test_a_part_by_the_name_of_another_step_is_refused(tmp_path):
    write_shard(tmp_path, make_shard(16), 0, 1).rename(tmp_path / file_name(32))
    with pytest.raises(DamagedShard) as caught:
        load_workers(tmp_path, 32)
    assert str(caught.value) == "step-00000032.0-of-1.npz holds step 16, not 32"
    assert_same(
        read_shard((tmp_path / file_name(32)).rename(tmp_path / "x")), make_shard(16)
    )


OTHER = make_shard(8, 4, 2, 2)  # fits to the first two of four workers
FOREIGNERS = [
    ("workers", {"workers": 6}),
    ("arrays", {"own": {"w": OTHER.own["w"]}}),
    ("arrays", {"own": {**OTHER.own, "i": np.arange(2.0)}}),
    ("arrays", {"own": {**OTHER.own, "w": OTHER.own["w"][:, :2]}}),
    ("arrays", {"shared": {**OTHER.shared, "n": np.arange(2)}}),
    *(
        (name, {"record": {**OTHER.record, name: value}})
        for name, value in itertools.product(
            ("run_id", "start_id", "settings"), ({"seed": 1}, None)
        )
    ),
]


@pytest.mark.parametrize("differing, changes", FOREIGNERS)
def test_parts_of_two_runs_are_not_mixed(differing, changes, tmp_path):
    write_shard(tmp_path, make_shard(8, 4, 0, 2), 0, 2)
    write_shard(tmp_path, OTHER, 1, 2)
    load_workers(tmp_path, 8)
    write_shard(tmp_path, OTHER._replace(**changes), 1, 2)
    with pytest.raises(DamagedShard) as caught:
        load_workers(tmp_path, 8)
    message = f"{file_name(8, 1, 2)} is of another run than {file_name(8, 0, 2)}: its "
    assert str(caught.value) == f"{message}{differing} differ"
    assert load_workers(tmp_path, 8, rows(0, 2)).record["first"] == 0


# What cannot be written

BAD_LEAVES = {
    "objects": np.array([None, 1]),
    "text": np.array(["a", "b"]),
    "dates": np.array([0, 1], "M8[s]"),
    "records": np.zeros(2, "i4, f4"),
    "foreign byte order": np.arange(2, dtype=">i4"),
    "no rows": np.asarray(1),
    "other rows": np.arange(3),
}


UNWRITABLE = [
    *({"own": {"x": np.arange(2), "bad": leaf}} for leaf in BAD_LEAVES.values()),
    *({"own": {}}, {"first": 1}, {"first": -1}, {"step": -1}),
    *({"number": 1}, {"number": -1, "of": 2}),
    {"record": {"path": Path()}},  # no JSON
]


@pytest.mark.parametrize("changes", UNWRITABLE, ids=str)
def test_a_part_that_could_not_be_read_is_not_written(changes, tmp_path):
    place = {"number": 0, "of": 1, **changes}
    shard_fields = {x: changes[x] for x in changes if x in Shard._fields}
    part = Shard(1, 2, 0, {"x": np.arange(2)}, {}, {})._replace(**shard_fields)
    with pytest.raises(TypeError if "record" in changes else ValueError):
        write_shard(tmp_path, part, place["number"], place["of"])
    assert names(tmp_path) == []


def test_wherever_room_ends_nothing_is_left(tmp_path):
    """A file's largest size stands for a disk that is full after so many bytes."""
    resource = pytest.importorskip("resource")
    path = write_shard(tmp_path, make_shard(size=2000), 0, 1)
    size = path.stat().st_size
    old_limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        for limit in range(0, size, 97):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old_limits[1]))
            with pytest.raises(OSError):
                write_shard(tmp_path, make_shard(64, size=2000), 0, 1)
            assert names(tmp_path) == [path.name]
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, old_limits[1]))
        write_shard(tmp_path, make_shard(64, size=2000), 0, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old_limits)
    assert find_steps(tmp_path) == [64, 32]


# Records

PROGRESS = {"step": 7, "losses": [0.5, 0.25, 0.125], "seconds": 0.5, "run_id": "ab"}
RECORD = {"settings": {"lr": 0.1}, "versions": {"jax": "0.10.2"}, "sent": 96}
RECORD |= {"run_id": "ab", "progress": PROGRESS}
OTHER_RECORDS = {
    "a new field": lambda x: x.update(new=None),
    "a new one of progress": lambda x: x["progress"].update(new=0),
    "no settings": lambda x: x.pop("settings"),
    "no progress": lambda x: x.pop("progress"),
    "a word for progress": lambda x: x.update(progress="7"),
    "another step": lambda x: x["progress"].update(step=8),
}


@pytest.mark.parametrize("change", OTHER_RECORDS)
def test_a_record_of_another_version_is_damage(change, tmp_path):
    part = copy.deepcopy(make_shard(7, record=RECORD))
    records = []

    def check(shard):
        records.append(read_record(shard))

    path = write_shard(tmp_path, part, 0, 1)
    load_workers(tmp_path, 7, check=check)
    assert records[0].progress.losses == PROGRESS["losses"] and records[0].data == ""
    OTHER_RECORDS[change](part.record)
    write_shard(tmp_path, part, 0, 1)
    with pytest.raises(DamagedShard) as caught:
        load_workers(tmp_path, 7, check=check)
    message = str(caught.value)
    assert (
        message.startswith(f"{path.name} is not usable: its record")
        and "\n" not in message
    )


# Room


def test_the_newest_are_kept(tmp_path):
    touched(tmp_path, (8, 2), (16, 2), (24, 2), (32, 2))
    prune_shards(tmp_path, 2, 1, 2)
    assert names(tmp_path) == [
        *(file_name(step, 0, 2) for step in (8, 16)),
        *(file_name(24, number, 2) for number in range(2)),
        *(file_name(32, number, 2) for number in range(2)),
    ]
    prune_shards(tmp_path, 0, 0, 2)
    assert names(tmp_path) == [file_name(step, 1, 2) for step in (24, 32)]


@pytest.mark.parametrize("number", range(2))
def test_what_other_layouts_left_is_removed(number, tmp_path):
    touched(tmp_path, (8, 1), (16, 3), (24, 2))
    prune_shards(tmp_path, 2, number, 2)
    assert find_steps(tmp_path) == [24, 16]
    remove_shards(tmp_path, [16, 32], number, 2)
    assert names(tmp_path) == [file_name(24, i, 2) for i in range(2)]


def test_parts_newer_than_the_last_are_neither_removed_nor_counted(tmp_path):
    touched(tmp_path, (8, 2), (16, 2), (24, 3), (32, 2))
    for number in range(2):
        prune_shards(tmp_path, 1, number, 2, newest=16)
    assert find_steps(tmp_path) == [32, 24, 16]


def test_only_parts_of_the_named_runs_are_removed(tmp_path):
    runs = {8: "ours", 16: "another", 24: None, 32: "ours", 40: "ours"}
    for step, run_id in runs.items():
        record = {} if run_id is None else {"run_id": run_id}
        write_shard(tmp_path, make_shard(step, record=record), 0, 1)
    torn = tmp_path / file_name(32)
    torn.write_bytes(torn.read_bytes()[:-300])
    prune_shards(tmp_path, 1, 0, 1, newest=40, run_ids=["ours"])
    assert find_steps(tmp_path) == [40, 32, 24, 16]
    remove_shards(tmp_path, [24], 0, 1, ["ours", None])
    assert find_steps(tmp_path) == [40, 32, 16]
    prune_shards(tmp_path, 0, 0, 1)
    assert find_steps(tmp_path) == []


def test_unfinished_files_of_processes_that_write_stay(tmp_path):
    ends = [".unfinished", ".0a1b2c3d.tmp"]  # as 0.3 left them, and as they are now
    for end in ends:
        for processes in (2, 3):
            for number in (0, 1):
                (tmp_path / f".{number}-of-{processes}{end}").touch()
    other_names = {".other", ".1-of-2.txt"}
    for name in other_names:
        (tmp_path / name).touch()
    prune_shards(tmp_path, 3, 1, 2)
    assert {*names(tmp_path)} == {*other_names, *(f".0-of-2{end}" for end in ends)}


def test_a_part_is_replaced_and_its_unfinished_file_with_it(tmp_path):
    for name in (".0-of-1.0a1b2c3d.tmp", ".1-of-2.0a1b2c3d.tmp"):
        tmp_path.joinpath(name).write_bytes(b"torn")
    write_shard(tmp_path, make_shard(8, 4), 0, 1)
    write_shard(tmp_path, make_shard(8, 6), 0, 1)
    assert load_workers(tmp_path, 8).workers == 6
    assert names(tmp_path) == [".1-of-2.0a1b2c3d.tmp", ShardName(8, 0, 1).file_name]


def test_background_work_ends_before_the_next_begins_and_raises_when_waited_for():
    calls = []
    background = Background()

    def slow():
        time.sleep(0.05)
        calls.append("first")

    def failing():
        calls.append("second")
        raise ValueError("no room")

    background.start(slow)
    assert not calls
    background.start(failing)
    with pytest.raises(ValueError, match="no room"):
        background.wait()
    assert calls == ["first", "second"]
    background.wait()  # an error is raised once
    calls.clear()
    with pytest.raises(ZeroDivisionError), Background() as background:
        background.start(slow)  # an error of the run costs no checkpoint
        raise ZeroDivisionError
    assert calls == ["first"]
