"""The data sets' formats: the real files, and what each reader refuses."""

import gzip
import hashlib
import io
import lzma
import os
import pickle
import struct
import tarfile
import wave
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_tasks import folder_with

from experiments.tasks.data import archives, cifar, idx, speech, text
from experiments.tasks.data.files import File

TAR_GZ, TAR = speech.TAR_GZ.path, speech.TAR.path
PLAYS = text.SHAKESPEARE.path


def put(folder, path, content):
    """Writes a file below folder and pins it."""
    (folder / path).parent.mkdir(exist_ok=True)
    (folder / path).write_bytes(content)
    return File(path, len(content), hashlib.sha256(content).hexdigest(), ())


def tar(members, **attributes):
    """A tar archive of contents by name; attributes are every member's."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            for attribute, value in attributes.items():
                setattr(member, attribute, value)
            archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


@pytest.mark.parametrize(
    "name, train_counts, test_counts",
    [
        (
            "mnist",
            [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
            [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009],
        ),
        ("fashion-mnist", [6000] * 10, [1000] * 10),
    ],
)
def test_idx_data_sets_have_their_published_counts(name, train_counts, test_counts):
    folder = folder_with(*(file.path for file in idx.FILES[name]))
    for part, counts in zip(
        idx.images(name, folder), (train_counts, test_counts), strict=True
    ):
        assert (part["x"].shape, part["x"].dtype) == ((sum(counts), 28, 28), np.uint8)
        assert part["y"].dtype == np.int32
        assert np.bincount(part["y"]).tolist() == counts
        assert (part["x"].min(), part["x"].max()) == (0, 255)


@pytest.mark.parametrize(
    ("place", "name"),
    [("mnist", "{}-idx{}"), ("MNIST/raw", "{}-idx{}"), (".", "{}.idx{}")],
)
def test_mnist_is_found_unpacked_where_others_keep_it(place, name, tmp_path):
    packed = folder_with(*(file.path for file in idx.FILES["mnist"]))
    (tmp_path / place).mkdir(parents=True, exist_ok=True)
    for file in idx.FILES["mnist"]:
        own = name.format(*Path(file.path).stem.split("-idx"))
        content = gzip.decompress((packed / file.path).read_bytes())
        (tmp_path / place / own).write_bytes(content)
    parts = zip(idx.images("mnist", tmp_path), idx.images("mnist", packed), strict=True)
    for own, expected in parts:
        np.testing.assert_array_equal(own["x"], expected["x"])
        np.testing.assert_array_equal(own["y"], expected["y"])


def test_mnist_images_are_upright_and_belong_to_their_labels():
    """Zeros are empty in the middle; ones are filled there, higher than wide."""
    folder = folder_with(*(file.path for file in idx.FILES["mnist"]))
    _, test = idx.images("mnist", folder)
    zero, one = (test["x"][test["y"] == digit].mean(0) for digit in (0, 1))
    assert one[14, 14] > 200 > 20 > zero[14, 14]
    rows, columns = ((one > 50).any(axis).sum() for axis in (1, 0))
    assert rows > 1.5 * columns


def test_idx_reads_dimensions_from_the_high_byte_down(tmp_path):
    expected = np.arange(600, dtype=np.uint8).reshape(2, 300)
    content = b"\0\0\x08\x02" + struct.pack(">II", 2, 300) + expected.tobytes()
    put(tmp_path, "a.gz", gzip.compress(content))
    np.testing.assert_array_equal(idx.read(tmp_path / "a.gz"), expected)


@pytest.mark.parametrize(
    "content, problem",
    [
        (b"not zipped", "not a complete gzip file"),
        (gzip.compress(b"\0\0\x08\x01\0\0\0\x04abcd")[:-9], "not a complete gzip file"),
        (gzip.compress(b""), "must begin with 00 00 08 .* got nothing"),
        (gzip.compress(b"\0\0\x0d\x01\0\0\0\x01abcd"), "got 00 00 0d 01"),
        (gzip.compress(b"\0\0\x08\x03\0\0\0\x01"), "ends inside its header of 3"),
        (gzip.compress(b"\0\0\x08\x01\0\0\0\x05abcd"), r"hold 5 bytes .*\(5,\), got 4"),
        (gzip.compress(b"\0\0\x08\x01\0\0\0\x03abcd"), r"hold 3 bytes .*\(3,\), got 4"),
        (
            gzip.compress(b"\0\0\x08\x02" + b"\xff" * 8),
            "must hold 18446744065119617025",
        ),
    ],
    ids=range(8),
)
def test_a_malformed_idx_file_is_named_with_what_is_wrong(content, problem, tmp_path):
    put(tmp_path, "bad.gz", content)
    with pytest.raises(ValueError, match=problem) as caught:
        idx.read(tmp_path / "bad.gz")
    assert str(tmp_path / "bad.gz") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_images_without_as_many_labels_are_refused(tmp_path, monkeypatch):
    x = gzip.compress(b"\0\0\x08\x03" + struct.pack(">III", 2, 28, 28) + bytes(1568))
    y = gzip.compress(b"\0\0\x08\x01" + struct.pack(">I", 3) + bytes(3))
    pair = (put(tmp_path, "mnist/x.gz", x), put(tmp_path, "mnist/y.gz", y))
    monkeypatch.setitem(idx.FILES, "mnist", pair * 2)
    with pytest.raises(ValueError, match=r"got \(2, 28, 28\) and \(3,\)"):
        idx.images("mnist", tmp_path)


def test_an_unknown_data_set_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(ValueError, match=r"'minst'; did you mean 'mnist'\?"):
        idx.images("minst", tmp_path)


def test_an_archive_is_read_whole_whether_zipped_or_not(tmp_path):
    content = tar({"a/b": b"one", "c": b""})
    for packed in (content, gzip.compress(content)):
        put(tmp_path, "archive", packed)
        found = archives.members(tmp_path / "archive", 1 << 20, "it")
        assert found == {"a/b": b"one", "c": b""}


GZIPPED = gzip.compress(tar({"a": os.urandom(5000)}))


@pytest.mark.parametrize(
    "content, problem",
    [
        (tar({"../evil": b"x"}), r"'\.\./evil' leads out of the folder"),
        (tar({"a/../../evil": b"x"}), "leads out of the folder"),
        (tar({"/etc/evil": b"x"}), "'/etc/evil' leads out of the folder"),
        (tar({"a": b""}, type=tarfile.SYMTYPE, linkname="/etc"), "'a' is a link"),
        (tar({"a": b""}, type=tarfile.LNKTYPE, linkname="b"), "'a' is a link"),
        (tar({"a": b""}, type=tarfile.FIFOTYPE), "'a' is a link or a device"),
        (gzip.compress(tar({"a": bytes(2 << 20)})), "unpacks to more than 1048576"),
        (tar({"a": b"x" * 5000})[:2000], "not a readable tar archive"),
        (GZIPPED[:-1000], "not a readable tar archive"),
        (GZIPPED[:-8] + bytes(8), "not a readable tar archive"),  # its checksum
        (b"nothing like it", "not a readable tar archive"),
        (b"", "not a readable tar archive"),
        (lzma.compress(tar({"a": b"x"})), "not a readable tar archive"),
        (gzip.compress(GZIPPED), "not a readable tar archive"),
    ],
    # By default the archive's bytes, which hold the time of day.
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_an_archive_that_is_broken_or_leaves_its_folder_is_refused(
    content, problem, tmp_path
):
    put(tmp_path, "inside/archive", content)
    with pytest.raises(ValueError, match=f"^it .*{problem}") as caught:
        archives.members(tmp_path / "inside" / "archive", 1 << 20, "it")
    assert "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.rglob("*")] == ["inside", "archive"]


@pytest.fixture(scope="module")
def packed():
    """The pinned tar, from the staged file."""
    return gzip.decompress((folder_with(TAR_GZ) / TAR_GZ).read_bytes())


@pytest.fixture(scope="module")
def recordings():
    return speech.recordings(folder_with(TAR_GZ))


def test_the_two_pins_of_the_recordings_are_of_the_same_tar(packed):
    assert hashlib.sha256(packed).hexdigest() == speech.TAR.sha256
    assert len(packed) == speech.TAR.size


def upstream(packed):
    """The recordings as GitHub packs a tag: under a folder, among other files."""
    top, out = "free-spoken-digit-dataset-1.0.10", io.BytesIO()
    headers = {"format": tarfile.PAX_FORMAT, "pax_headers": {"comment": "26eb9aa"}}
    with (
        tarfile.open(fileobj=io.BytesIO(packed)) as kept,
        tarfile.open(fileobj=out, mode="w:gz", compresslevel=1, **headers) as archive,
    ):
        for folder in (top, f"{top}/recordings"):
            member = tarfile.TarInfo(folder)
            member.type, member.mode = tarfile.DIRTYPE, 0o775
            archive.addfile(member)
        for name in ("README.md", "recordings/notes.txt"):
            archive.addfile(tarfile.TarInfo(f"{top}/{name}"))
        for member in reversed(kept.getmembers()):
            content = kept.extractfile(member)
            member.name = f"{top}/{member.name}"
            member.mode, member.mtime, member.uname = 0o664, 1_600_000_000, "root"
            archive.addfile(member, content)
    return out.getvalue()


def test_recordings_are_packed_to_the_same_bytes_wherever_they_come_from(
    packed, tmp_path
):
    for name, content in {"here": packed, "upstream": upstream(packed)}.items():
        put(tmp_path, name, content)
        assert speech.pack(tmp_path / name) == packed


def test_recordings_of_the_repository_are_packed_and_kept(packed, recordings, tmp_path):
    served = put(tmp_path, "fsdd/v1.0.10.tar.gz", upstream(packed))
    assert speech.TAR.urls[0].endswith(served.path.removeprefix("fsdd"))
    found = speech.recordings(tmp_path)
    assert (tmp_path / TAR).read_bytes() == packed
    (tmp_path / served.path).unlink()
    again = speech.recordings(tmp_path)
    for recording, *others in zip(recordings, found, again, strict=True):
        for other in others:
            assert other[:3] == recording[:3]
            np.testing.assert_array_equal(other.samples, recording.samples)


def test_recordings_are_of_six_speakers_who_say_each_digit_fifty_times(recordings):
    counts = Counter((r.speaker, r.digit) for r in recordings)
    speakers = {"george", "jackson", "lucas", "nicolas", "theo", "yweweler"}
    assert counts == {(who, digit): 50 for who in speakers for digit in range(10)}
    assert {r.take for r in recordings} == set(range(50))
    lengths = [len(r.samples) for r in recordings]
    assert (min(lengths), max(lengths), int(np.median(lengths))) == (1148, 18262, 3358)
    assert sum(lengths) // 8000 == 1312  # seconds
    assert all(r.samples.dtype == np.int16 for r in recordings)


def wav(samples=(1, -2, 3), channels=1, width=2, rate=8000):
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(np.array(samples, "<i2").tobytes())
    return out.getvalue()


GOOD = "recordings/3_theo_14.wav"


@pytest.mark.parametrize(
    "name, content, problem",
    [
        (GOOD, wav(rate=16000), r"at 8000 Hz, got \(1, 2, 16000\)"),
        (GOOD, wav(samples=(1, 2), channels=2), r"got \(2, 2, 8000\)"),
        (GOOD, wav(width=1), r"got \(1, 1, 8000\)"),
        (GOOD, b"RIFX" + bytes(40), "is not a WAV file"),
        (GOOD, wav()[:20], "is not a WAV file"),
        ("recordings/theo.wav", wav(), "is not recordings/DIGIT_SPEAKER_TAKE.wav"),
    ],
)
def test_a_malformed_recording_is_named_with_what_is_wrong(
    name, content, problem, tmp_path, monkeypatch
):
    monkeypatch.setattr(speech, "TAR_GZ", put(tmp_path, TAR_GZ, tar({name: content})))
    with pytest.raises(ValueError, match=f"{name} .*{problem}") as caught:
        speech.recordings(tmp_path)
    assert str(tmp_path / TAR_GZ) in str(caught.value)


def test_a_recording_is_read_from_its_name_and_its_samples(tmp_path, monkeypatch):
    monkeypatch.setattr(speech, "TAR_GZ", put(tmp_path, TAR_GZ, tar({GOOD: wav()})))
    [recording] = speech.recordings(tmp_path)
    assert recording[:3] == (3, "theo", 14)
    assert recording.samples.tolist() == [1, -2, 3]


def log_mel_by_definition(samples):
    """Frame by frame and band by band, in float64, by the sum that defines a DFT."""
    edges = 700 * (10 ** (np.linspace(0, 2595 * np.log10(1 + 4000 / 700), 42) / 2595))
    edges -= 700
    n = np.arange(200)
    hann = np.sin(np.pi * n / 200) ** 2
    waves = np.exp(-2j * np.pi * np.outer(np.arange(129), n) / 256)
    features = []
    for start in range(0, len(samples) - 200 + 1, 128):
        power = abs(waves @ (hann * samples[start : start + 200] / 32768)) ** 2
        bands = []
        for band in range(40):
            triangle = np.interp(
                np.arange(129) * 8000 / 256, edges[band : band + 3], [0, 1, 0]
            )
            bands.append(np.log(max(triangle @ power, 1e-6)))
        features.append(bands)
    return np.array(features)


@pytest.mark.parametrize("seconds", [0.025, 0.0409, 0.041, 0.5, None])
def test_log_mel_matches_its_definition(seconds, recordings):
    samples = recordings[1234].samples
    if seconds:
        draws = np.random.default_rng(0).normal(0, 3000, int(8000 * seconds))
        draws[200:400] *= 1e-4  # nearly silent
        samples = draws.astype(np.int16)
    found = speech.log_mel(samples)
    assert found.dtype == np.float32
    # float32 against float64: the logarithm of a sum of 129 squares
    atol = 2e-4 if seconds else 1e-3
    np.testing.assert_allclose(found, log_mel_by_definition(samples), 0, atol)


@pytest.mark.parametrize("band", [2, 11, 25, 38])
def test_a_tone_in_the_middle_of_a_band_peaks_there(band):
    mel = (band + 1) * 2595 * np.log10(1 + 4000 / 700) / 41
    hertz = 700 * (10 ** (mel / 2595) - 1)
    tone = np.sin(2 * np.pi * hertz * np.arange(4000) / 8000)
    features = speech.log_mel((20000 * tone).astype(np.int16))
    # 25 ms tell tones apart by 40 Hz and more: the lowest bands are 35 Hz wide.
    assert (abs(features.argmax(1) - band) <= (1 if band < 5 else 0)).all()


def test_silence_is_the_floor_and_too_short_a_sound_is_one_frame():
    features = speech.log_mel(np.zeros(150, np.int16))
    assert features.shape == (1, 40)
    np.testing.assert_allclose(features, np.log(1e-6), rtol=1e-6)


def test_spoken_digits_hold_out_the_first_five_takes():
    train, test, _ = speech.spoken_digits(folder_with(TAR_GZ))
    for part, each in ((train, 270), (test, 30)):
        n = 10 * each
        assert (part["x"].shape, part["x"].dtype) == ((n, 64, 40), np.float32)
        assert (part["length"].shape, part["length"].dtype) == ((n,), np.int32)
        assert (part["y"].shape, part["y"].dtype) == ((n,), np.int32)
        assert np.bincount(part["y"]).tolist() == [each] * 10
        own = np.arange(64) < part["length"][:, None]
        assert not part["x"][~own].any()
        assert part["x"][own].any(-1).all()
    own = train["x"][np.arange(64) < train["length"][:, None]]
    np.testing.assert_allclose(own.mean(0, np.float64), 0, atol=1e-5)
    np.testing.assert_allclose(own.std(0, np.float64), 1, atol=1e-5)


def test_spoken_digits_are_cut_and_normalised_by_what_is_trained_on(recordings):
    train, test, _ = speech.spoken_digits(folder_with(TAR_GZ), frames=12)
    shown = [speech.log_mel(r.samples)[:12] for r in recordings]
    own = np.concatenate(
        [x for x, r in zip(shown, recordings, strict=True) if 5 <= r.take < 50]
    ).astype(np.float64)
    held_out = [x for x, r in zip(shown, recordings, strict=True) if 0 <= r.take < 5]
    assert test["length"].tolist() == [len(x) for x in held_out]
    assert train["length"].max() == 12 > train["length"].min() == 8
    for row, x in zip(test["x"], held_out, strict=True):
        expected = (x - own.mean(0)) / own.std(0)
        np.testing.assert_allclose(row[: len(x)], expected, atol=1e-5)


def test_spoken_digits_of_no_frames_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"frames must be .* of at least 1, got 0"):
        speech.spoken_digits(tmp_path, frames=0)


@pytest.fixture(scope="module")
def plays():
    return text.text(folder_with(PLAYS))


def test_the_plays_have_65_characters_and_40000_lines(plays):
    assert plays.startswith("First Citizen:\nBefore we proceed any further")
    assert plays.count("\n") == 40_000
    codes, alphabet = text.characters(plays)
    assert (codes.shape, codes.dtype) == ((1_115_394,), np.int32)
    assert len(alphabet) == 65
    assert alphabet == sorted(set(plays))
    assert "".join(np.array(alphabet)[codes]) == plays


def test_the_plays_have_12631_words_in_falling_frequency(plays):
    codes, vocabulary = text.words(plays)
    assert codes.dtype == np.int32
    assert len(vocabulary) == len(set(vocabulary)) == 12_631
    opening = "first citizen before we proceed any further hear me speak all speak"
    assert [vocabulary[code] for code in codes[:12]] == opening.split()
    counts = np.bincount(codes, minlength=12_631)
    assert vocabulary[0] == "the"
    order = [(-n, word) for n, word in zip(counts, vocabulary, strict=True)]
    assert order == sorted(order)


def test_words_are_lower_case_and_keep_their_apostrophes():
    codes, vocabulary = text.words("Don't! The 3 dogs' the-end\nDON'T the")
    assert vocabulary == ["the", "don't", "dogs'", "end"]
    assert codes.tolist() == [1, 0, 2, 0, 3, 1, 0]


def test_characters_beyond_ascii_have_codes_too():
    codes, alphabet = text.characters("aé√a")
    assert alphabet == ["a", "é", "√"]
    assert codes.tolist() == [0, 1, 2, 0]


def test_the_last_tenth_is_held_out(plays):
    train, test = text.split(np.arange(20))
    assert (train.tolist(), test.tolist()) == (list(range(18)), [18, 19])
    train, test = text.split(text.characters(plays)[0])
    assert (len(train), len(test)) == (1_003_854, 111_540)


@pytest.mark.parametrize("held_out", [0, 1, -0.5, float("nan")])
def test_a_share_that_holds_out_nothing_or_all_is_refused(held_out):
    with pytest.raises(ValueError, match="held_out must be above 0 and below 1"):
        text.split(np.arange(10), held_out)


InPython: Any = pickle._Pickler  # without types in the standard library's stubs


class Python2(InPython):
    """Pickles text, bytes and arrays as Python 2 and its NumPy did."""

    def save(self, obj, save_persistent_id=True):
        if not isinstance(obj, str | bytes):
            return super().save(obj, save_persistent_id)
        plain = obj.encode() if isinstance(obj, str) else obj
        self.write(b"T" + struct.pack("<i", len(plain)) + plain)


def python2(value):
    out = io.BytesIO()
    Python2(out, protocol=2).dump(value)
    return out.getvalue().replace(b"numpy._core", b"numpy.core")


def batch(n, seed):
    """A batch as the data set has it, its images (n, height, width, channels), y."""
    draws = np.random.default_rng(seed)
    x = draws.integers(0, 256, (n, 32, 32, 3), np.uint8)
    y = draws.integers(0, 10, n)
    data = np.stack([x[..., c].reshape(n, -1) for c in range(3)], 1).reshape(n, -1)
    names = [f"image_{i}.png" for i in range(n)]
    label = f"batch {seed}"
    whole = {"batch_label": label, "labels": y.tolist(), "data": data}
    return python2({**whole, "filenames": names}), x, y


def archive(folder, contents, **changed):
    """Writes an archive; returns its path and its members' checksums."""
    named = {f"cifar-10-batches-py/{name}": x for name, x in contents.items()}
    put(folder, "cifar.tar.gz", gzip.compress(tar({**named, **changed})))
    members = {name: hashlib.sha256(x).hexdigest() for name, x in named.items()}
    return folder / "cifar.tar.gz", members


def test_cifar_batches_become_images_of_height_width_and_channels(tmp_path):
    batches = {f"data_batch_{i}": batch(2 + i, i) for i in (1, 2)}
    batches["test_batch"] = batch(4, 0)
    contents = {name: content for name, (content, _, _) in batches.items()}
    train, test = cifar.read(*archive(tmp_path, contents))
    for part, names in (
        (train, ["data_batch_1", "data_batch_2"]),
        (test, ["test_batch"]),
    ):
        x, y = (np.concatenate([batches[name][i] for name in names]) for i in (1, 2))
        np.testing.assert_array_equal(part["x"], x)
        np.testing.assert_array_equal(part["y"], y)
        assert (part["x"].dtype, part["y"].dtype) == (np.uint8, np.int32)


def test_the_pickles_here_are_read_alike_by_the_standard_library():
    content, x, y = batch(3, 0)
    read = pickle.loads(content, encoding="bytes")
    assert read[b"labels"] == y.tolist()
    np.testing.assert_array_equal(read[b"data"][:, :1024], x[..., 0].reshape(3, -1))


class MakesFolder:
    """Makes a folder when it is unpickled, if it can."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


class CallsNumPy:
    """Calls another function of a module that may be called."""

    def __reduce__(self):
        return np.load, ("evil.npy",)


@pytest.mark.parametrize(
    "make", [MakesFolder, lambda path: CallsNumPy()], ids=["os", "numpy"]
)
def test_a_pickle_that_calls_anything_else_is_refused(make, tmp_path):
    evil = str(tmp_path / "evil")
    content = pickle.dumps({"data": make(evil), "labels": []}, protocol=2)
    path, members = archive(tmp_path, {"data_batch_1": content, "test_batch": content})
    with pytest.raises(ValueError, match=r"data_batch_1 .*: it asks for ") as caught:
        cifar.read(path, members)
    assert str(path) in str(caught.value)
    assert not os.path.exists(evil)


def test_the_evil_pickle_would_have_worked(tmp_path):
    pickle.loads(pickle.dumps(MakesFolder(str(tmp_path / "evil"))))
    assert (tmp_path / "evil").is_dir()


def test_a_member_with_another_checksum_is_refused_before_it_is_unpickled(tmp_path):
    content = pickle.dumps(MakesFolder(str(tmp_path / "evil")))
    path, members = archive(tmp_path, {"test_batch": content})
    [name] = members
    pinned = hashlib.sha256(b"what was meant").hexdigest()
    with pytest.raises(ValueError) as caught:
        cifar.read(path, {name: pinned})
    message = str(caught.value)
    assert message == f"{path}: {name} has SHA-256 {members[name]}, not {pinned}"
    assert not (tmp_path / "evil").exists()


def test_an_archive_that_lacks_a_batch_is_refused(tmp_path):
    path, members = archive(tmp_path, {"test_batch": batch(2, 0)[0]})
    with pytest.raises(ValueError, match="lacks cifar-10-batches-py/data_batch_1"):
        cifar.read(path, {"cifar-10-batches-py/data_batch_1": "", **members})


def test_an_archive_with_a_member_outside_is_refused(tmp_path):
    contents = {"data_batch_1": batch(2, 1)[0], "test_batch": batch(2, 0)[0]}
    path, members = archive(tmp_path, contents, **{"../evil": b"x"})
    with pytest.raises(ValueError, match=r"'\.\./evil' leads out of the folder"):
        cifar.read(path, members)
    assert [p.name for p in tmp_path.iterdir()] == ["cifar.tar.gz"]


@pytest.mark.parametrize(
    "content, problem",
    [
        (b"not a pickle", "cannot be unpickled"),
        (batch(2, 0)[0][:-100], "cannot be unpickled"),
        (python2([1, 2]), "cannot be unpickled"),
        (python2({"data": "x", "labels": [1]}), "must hold 1 rows"),
        (python2({"data": "x", "labels": ["cat"]}), "cannot be unpickled"),
        (python2({"labels": [1]}), "cannot be unpickled"),
        (
            python2({"data": np.zeros((2, 3072), np.uint8), "labels": [1]}),
            r"must hold 1 rows of 3072 .* got uint8 \(2, 3072\)",
        ),
        (
            python2({"data": np.zeros((1, 3072), np.int32), "labels": [1]}),
            r"got int32 \(1, 3072\)",
        ),
    ],
)
def test_a_malformed_batch_is_named_with_what_is_wrong(content, problem, tmp_path):
    good = batch(2, 1)[0]
    path, members = archive(tmp_path, {"data_batch_1": good, "test_batch": content})
    with pytest.raises(ValueError, match=problem) as caught:
        cifar.read(path, members)
    assert f"{path}: cifar-10-batches-py/test_batch" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_cifar_pins_the_five_training_batches_in_order_and_the_test_batch():
    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    assert [*cifar.ARCHIVE.members] == [f"cifar-10-batches-py/{name}" for name in names]
    assert {len(sha256) for sha256 in cifar.ARCHIVE.members.values()} == {64}
