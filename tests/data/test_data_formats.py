"""The data sets' formats: the real files, and what each reader refuses."""

import gzip
import hashlib
import io
import itertools
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from support.formats import batch, cifar_archive, put, tar
from support.small_tasks import find_data_folder

from experiments.data import formats, tokens

TAR_GZ = formats.TAR_GZ.path
TAR = formats.TAR.path
PLAYS = tokens.SHAKESPEARE.path


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
    folder = find_data_folder(*(file.path for file in formats.IDX_FILES[name]))
    for part, counts in zip(
        formats.mnist_images(name, folder), (train_counts, test_counts), strict=True
    ):
        assert (part["x"].shape, part["x"].dtype) == ((sum(counts), 28, 28), np.uint8)
        assert part["y"].dtype == np.int32
        assert np.bincount(part["y"]).tolist() == counts
        assert (part["x"].min(), part["x"].max()) == (0, 255)


@pytest.mark.slow
def test_mnist_is_found_unpacked_where_others_keep_it(tmp_path):
    packed = find_data_folder(*(file.path for file in formats.IDX_FILES["mnist"]))
    places = "mnist/{}-idx{}", "MNIST/raw/{}-idx{}", "{}.idx{}", "mnist/{}.idx{}"
    for place, file in zip(places, formats.IDX_FILES["mnist"], strict=True):
        images = tmp_path / place.format(*Path(file.path).stem.split("-idx"))
        images.parent.mkdir(parents=True, exist_ok=True)
        images.write_bytes(gzip.decompress((packed / file.path).read_bytes()))
    parts = zip(
        formats.mnist_images("mnist", tmp_path),
        formats.mnist_images("mnist", packed),
        strict=True,
    )
    for images, expected in parts:
        np.testing.assert_array_equal(images["x"], expected["x"])
        np.testing.assert_array_equal(images["y"], expected["y"])


def test_an_archive_is_read_whole_whether_zipped_or_not(tmp_path):
    content = tar({"a/b": b"one", "c": b""})
    for packed in (content, gzip.compress(content)):
        put(tmp_path, "archive", packed)
        members = formats.members(tmp_path / "archive", 1 << 20, "it")
        assert members == {"a/b": b"one", "c": b""}


@pytest.fixture(scope="module")
def packed():
    """The pinned tar, from the staged file."""
    return gzip.decompress((find_data_folder(TAR_GZ) / TAR_GZ).read_bytes())


@pytest.fixture(scope="module")
def recordings():
    return formats.recordings(find_data_folder(TAR_GZ))


def test_the_two_pins_of_the_recordings_are_of_the_same_tar(packed):
    assert hashlib.sha256(packed).hexdigest() == formats.TAR.sha256
    assert len(packed) == formats.TAR.size


def upstream(packed):
    """The recordings as GitHub packs a tag: under a folder, among other files."""
    top = "free-spoken-digit-dataset-1.0.10"
    out = io.BytesIO()
    headers = {"format": tarfile.PAX_FORMAT, "pax_headers": {"comment": "26eb9aa"}}
    with (
        tarfile.open(fileobj=io.BytesIO(packed)) as source_archive,
        tarfile.open(fileobj=out, mode="w:gz", compresslevel=1, **headers) as archive,
    ):
        for folder in (top, f"{top}/recordings"):
            member = tarfile.TarInfo(folder)
            member.type = tarfile.DIRTYPE
            member.mode = 0o775
            archive.addfile(member)
        for name in ("README.md", "recordings/notes.txt"):
            archive.addfile(tarfile.TarInfo(f"{top}/{name}"))
        for member in reversed(source_archive.getmembers()):
            content = source_archive.extractfile(member)
            member.name = f"{top}/{member.name}"
            member.mode = 0o664
            member.mtime = 1_600_000_000
            member.uname = "root"
            archive.addfile(member, content)
    return out.getvalue()


@pytest.mark.slow
def test_recordings_of_the_repository_are_packed_and_kept(packed, recordings, tmp_path):
    """To the same bytes, whatever a server has packed them in."""
    served = put(tmp_path, "fsdd/v1.0.10.tar.gz", upstream(packed))
    assert formats.TAR.urls[0].endswith(served.path.removeprefix("fsdd"))
    packed_recordings = formats.recordings(tmp_path)
    assert (tmp_path / TAR).read_bytes() == packed
    (tmp_path / served.path).unlink()
    again = formats.recordings(tmp_path)
    for recording, *copies in zip(recordings, packed_recordings, again, strict=True):
        for other in copies:
            assert other[:3] == recording[:3]
            np.testing.assert_array_equal(other.samples, recording.samples)


def test_recordings_are_of_six_speakers_who_say_each_digit_fifty_times(recordings):
    counts = Counter((r.speaker, r.digit) for r in recordings)
    speakers = {"george", "jackson", "lucas", "nicolas", "theo", "yweweler"}
    pairs = itertools.product(speakers, range(10))
    assert counts == dict.fromkeys(pairs, 50)
    assert {r.take for r in recordings} == set(range(50))
    lengths = [len(r.samples) for r in recordings]
    assert (min(lengths), max(lengths), int(np.median(lengths))) == (1148, 18262, 3358)
    assert sum(lengths) // 8000 == 1312  # seconds
    assert all(r.samples.dtype == np.int16 for r in recordings)


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


@pytest.mark.parametrize("seconds", [0.025, 0.0409, 0.041, None])
def test_log_mel_matches_its_definition(seconds, recordings):
    samples = recordings[1234].samples
    if seconds:
        draws = np.random.default_rng(0).normal(0, 3000, int(8000 * seconds))
        draws[200:400] *= 1e-4  # nearly silent
        samples = draws.astype(np.int16)
    spectrum = formats.log_mel(samples)
    assert spectrum.dtype == np.float32
    # float32 against float64: the logarithm of a sum of 129 squares
    atol = 2e-4 if seconds else 1e-3
    np.testing.assert_allclose(spectrum, log_mel_by_definition(samples), 0, atol)


def test_silence_is_the_floor_and_too_short_a_sound_is_one_frame():
    features = formats.log_mel(np.zeros(150, np.int16))
    assert features.shape == (1, 40)
    np.testing.assert_allclose(features, np.log(1e-6), rtol=1e-6)


@pytest.mark.slow
def test_spoken_digits_hold_out_five_takes_and_are_normalised_by_the_others(
    recordings, monkeypatch
):
    recordings = recordings[::7]
    monkeypatch.setattr(formats, "recordings", lambda folder: recordings)
    train, test, _ = formats.spoken_digits(find_data_folder(TAR_GZ), frames=12)
    takes = np.array([r.take for r in recordings])
    digits = np.array([r.digit for r in recordings])
    spectra = [formats.log_mel(r.samples)[:12] for r in recordings]
    train_frames = np.concatenate([spectra[i] for i in np.flatnonzero(takes >= 5)])
    mean = train_frames.mean(0, np.float64)
    deviation = train_frames.std(0, np.float64)
    for part, chosen in ((train, takes >= 5), (test, takes < 5)):
        rows = [(spectra[i] - mean) / deviation for i in np.flatnonzero(chosen)]
        expected = [np.pad(x, [(0, 12 - len(x)), (0, 0)]) for x in rows]
        np.testing.assert_allclose(part["x"], expected, atol=1e-5)
        assert part["length"].tolist() == [len(x) for x in rows]
        np.testing.assert_array_equal(part["y"], digits[chosen])
        assert [x.dtype.name for x in part.values()] == ["float32", "int32", "int32"]
    assert train["length"].max() == 12 > train["length"].min()


@pytest.fixture(scope="module")
def plays():
    return tokens.shakespeare(find_data_folder(PLAYS))


def test_the_plays_have_65_characters_and_40000_lines(plays):
    assert plays.startswith("First Citizen:\nBefore we proceed any further")
    assert plays.count("\n") == 40_000
    codes, alphabet = tokens.characters(plays)
    assert (codes.shape, codes.dtype) == ((1_115_394,), np.int32)
    assert len(alphabet) == 65
    assert alphabet == sorted(set(plays))
    assert "".join(np.array(alphabet)[codes]) == plays


def test_the_plays_have_12631_words_in_falling_frequency(plays):
    codes, vocabulary = tokens.words(plays)
    assert codes.dtype == np.int32
    assert len(vocabulary) == len(set(vocabulary)) == 12_631
    opening = "first citizen before we proceed any further hear me speak all speak"
    assert [vocabulary[code] for code in codes[:12]] == opening.split()
    counts = np.bincount(codes, minlength=12_631)
    assert vocabulary[0] == "the"
    order = [(-n, word) for n, word in zip(counts, vocabulary, strict=True)]
    assert order == sorted(order)


def test_words_are_lower_case_and_keep_their_apostrophes():
    codes, vocabulary = tokens.words("Don't! The 3 dogs' the-end\nDON'T the")
    assert vocabulary == ["the", "don't", "dogs'", "end"]
    assert codes.tolist() == [1, 0, 2, 0, 3, 1, 0]


def test_characters_beyond_ascii_have_codes_too():
    codes, alphabet = tokens.characters("aé√a")
    assert alphabet == ["a", "é", "√"]
    assert codes.tolist() == [0, 1, 2, 0]


def test_the_last_tenth_is_held_out(plays):
    train, test = tokens.split(np.arange(20))
    assert (train.tolist(), test.tolist()) == (list(range(18)), [18, 19])
    train, test = tokens.split(tokens.characters(plays)[0])
    assert (len(train), len(test)) == (1_003_854, 111_540)


def test_cifar_batches_become_images_of_height_width_and_channels(tmp_path):
    batches = {f"data_batch_{i}": batch(2 + i, i) for i in (1, 2)}
    batches["test_batch"] = batch(4, 0)
    contents = {name: content for name, (content, _, _) in batches.items()}
    train, test = formats.read_cifar(cifar_archive(tmp_path, contents))
    for part, names in (
        (train, ["data_batch_1", "data_batch_2"]),
        (test, ["test_batch"]),
    ):
        x = np.concatenate([batches[name][1] for name in names])
        y = np.concatenate([batches[name][2] for name in names])
        np.testing.assert_array_equal(part["x"], x)
        np.testing.assert_array_equal(part["y"], y)
        assert (part["x"].dtype, part["y"].dtype) == (np.uint8, np.int32)
