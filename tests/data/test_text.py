"""Any text as tokens: streamed, complete or absent, each token predicted once."""

import gzip
import itertools
import json
import os
import re
import sys
from functools import partial

import jax
import numpy as np
import pytest
from support.commands import together

from experiments import run
from experiments.data import repeats, tokens
from experiments.tasks.text import Windows, text
from experiments.training.export import load
from models import gpt

tokenizers = pytest.importorskip("tokenizers")
END = "<|endoftext|>"
# Characters of several bytes, both kinds of line ends, and the words of the end.
VERSES = [
    "".join(f"Line {i} of a song, längst wie 日本語 🎈.\r\n\n" for i in range(40)),
    f"One {END} two\n  and   three\n" * 30,
    "x" * 1000,  # no line's end
]


@pytest.fixture
def songs(tmp_path):
    """A folder of three plain files and an empty one, read in pieces of 100 bytes."""
    folder = tmp_path / "songs"
    folder.mkdir()
    for name, song in zip("abd", VERSES, strict=True):
        (folder / f"{name}.txt").write_bytes(song.encode())
    (folder / "c.txt").touch()
    return folder


def find_documents(words, column="text"):
    return tokens.find_documents("--text", str(words), column)


def make_tokens(source, folder, size=300, limit=None):
    """The tokenizer that is trained on a text, and the text's tokens."""
    tokenizer = tokens.train_tokenizer(source, size, END, folder)
    return tokenizer, tokens.tokenize_text(source, tokenizer, END, limit, folder)


def decode_documents(values, tokenizer):
    """The documents that tokens stand for."""
    ends = np.flatnonzero(values == tokenizer.token_to_id(END))
    assert ends[-1] == len(values) - 1
    parts = np.split(values, ends + 1)[:-1]
    return [tokenizer.decode(x[:-1], skip_special_tokens=False) for x in parts]


# What is read


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100, 10**6])
def test_pieces_of_a_file_are_its_text_whole(songs, size, monkeypatch):
    monkeypatch.setattr(tokens, "PIECE", size)
    pieces = [*find_documents(songs / "a.txt").pieces()]
    assert "".join(text for text, _ in pieces) == VERSES[0]
    assert [is_end for _, is_end in pieces] == [False] * (len(pieces) - 1) + [True]
    assert max(len(text) for text, _ in pieces) < 2 * size + 60  # the longest line
    assert not [*find_documents(songs / "c.txt").pieces()]


@pytest.mark.parametrize("piece", [50, 2**16])
def test_tokens_stand_for_the_bytes_of_documents(songs, tmp_path, monkeypatch, piece):
    monkeypatch.setattr(tokens, "PIECE", piece)
    monkeypatch.setattr(tokens, "BATCH", 10 * piece)
    tokenizer, row = make_tokens(find_documents(f"{songs}/*.txt"), tmp_path)
    assert decode_documents(row.values, tokenizer) == VERSES
    counts = tokens.byte_counts(tokenizer)
    assert counts is not None
    assert counts[row.values].sum() == sum(len(song.encode()) for song in VERSES)
    assert row.values.dtype == np.uint16


def rows(suffix, folder):
    """Writes documents in a format; returns the words that name them."""
    documents = [VERSES[0], None, "", *VERSES[1:]]
    path = folder / f"rows{suffix}"
    if suffix == ".txt":  # of datasets: a line each
        path.write_text("".join(f"{x}\n" for x in range(9)))
    elif suffix == ".parquet":
        from datasets import Dataset, disable_progress_bars

        disable_progress_bars()
        Dataset.from_dict({"number": range(5), "text": documents}).to_parquet(path)
    else:
        lines = "".join(
            f"{json.dumps({'id': 1, 'text': x})}\n" for x in documents
        ).encode()
        path.write_bytes(gzip.compress(lines) if suffix.endswith(".gz") else lines)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suffix", "by_folder"),
    [
        *((suffix, False) for suffix in (".jsonl", ".jsonl.gz", ".parquet", ".txt")),
        *((suffix, True) for suffix in (".parquet", ".txt")),
    ],
)
def test_rows_of_a_dataset_are_documents(suffix, by_folder, tmp_path):
    """A file, or what `load_dataset` makes of a folder's name, as of the hub's."""
    pytest.importorskip("datasets")
    folder = tmp_path / "set"
    folder.mkdir()
    path = rows(suffix, folder)
    expected = VERSES
    if suffix == ".txt":
        expected = [*"012345678"] if by_folder else [path.read_text()]
    tokenizer, row = make_tokens(
        find_documents(f"hf:{folder}" if by_folder else path), tmp_path
    )
    assert decode_documents(row.values, tokenizer) == expected


def test_the_first_tokens_of_a_stream_are_taken_and_no_more_is_read(
    tmp_path, monkeypatch
):
    pytest.importorskip("datasets")
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"text": "row {i}"}}\n' for i in range(20_000)))
    monkeypatch.setattr(tokens, "TRAINED_ON", 1000)
    monkeypatch.setattr(tokens, "BATCH", 1000)
    read = []
    rows = tokens.Documents._rows

    def counted(*args, **kwargs):
        for row in rows(*args, **kwargs):
            read.append(row)
            yield row

    monkeypatch.setattr(tokens.Documents, "_rows", counted)
    _, some = make_tokens(find_documents(path), tmp_path, limit=777)
    assert (len(some.values), len(read) < 1000) == (777, True)
    _, all_tokens = make_tokens(find_documents(path), tmp_path)
    np.testing.assert_array_equal(some.values, all_tokens.values[:777])
    assert len(read) > 20_000


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_a_file_may_have_the_name_of_a_glob(suffix, tmp_path):
    if suffix == ".jsonl":
        pytest.importorskip("datasets")
    for name, word in {"a[1]": "mine", "a1": "another"}.items():
        content = f'{{"text": "{word}"}}\n' if suffix == ".jsonl" else word
        (tmp_path / f"{name}{suffix}").write_text(content)
    pieces = find_documents(tmp_path / f"a[1]{suffix}").pieces()
    assert "".join(text for text, _ in pieces) == "mine"


def test_a_file_that_several_patterns_name_is_read_once(songs):
    (songs / "e.txt").symlink_to(songs / "b.txt")
    pieces = find_documents(f"{songs}/b.txt,{songs}/../songs/*.txt").pieces()
    assert "".join(text for text, _ in pieces) == VERSES[1] + VERSES[0] + VERSES[2]


@pytest.mark.skipif(sys.platform != "linux", reason="needs a file that is not readable")
@pytest.mark.parametrize("read", [lambda x: x.key, lambda x: [*x.pieces()]])
def test_a_file_that_cannot_be_read_is_named(read):
    source = find_documents("/proc/self/mem")  # its beginning is no memory
    with pytest.raises(ValueError, match=r"^/proc/self/mem cannot be read: Input/out"):
        read(source)


def broken(folder):
    """Writes texts that cannot be used; yields the flags, and what is said of them."""
    good = folder / "good.txt"
    good.write_text("some words and more\n" * 400)
    bad = folder / "latin.txt"
    bad.write_bytes(b"a line\n" * 20 + "für".encode("latin-1"))
    yield (
        f"--text {good},{bad}",
        f"{bad} is not UTF-8: byte 141 is 0xfc: convert it to UTF-8",
    )
    cut = folder / "cut.txt"
    cut.write_bytes("für".encode()[:2])
    yield f"--text {cut}", f"{cut} is not UTF-8: byte 1 is 0xc3"
    empty = folder / "empty.txt"
    empty.touch()
    yield f"--text {empty}", f"--text {empty}: it holds no text"
    short = folder / "short.txt"
    short.write_text("some words")
    yield f"--text {short}", "tokens to train on are fewer than a window of --context 8"
    yield f"--text {good} --test-text {short}", "held out are fewer than a window"
    yield f"--text {good} --held-out 1.0", "--held-out must be above 0 and below 1"
    yield f"--text {good} --held-out 0.1 --test-text {good}", "exclude each other"
    link = folder / "link.txt"
    link.symlink_to(good)
    yield (
        f"--text {folder}/go*.txt --test-text {short},{link}",
        f"{good.resolve()} is also in --text: hold out other text",
    )
    yield f"--text {good},{folder}/no*", f"there is no file {folder}/no*"
    yield f"--text {good},{folder}", f"there is no file {folder}"
    yield (
        f"--text {good} --vocabulary 256",
        "--vocabulary must be a whole number of at least 257",
    )
    yield f"--text {good} --tokenizer {good}", f"--tokenizer {good}: "
    other = folder / "other.json"
    model = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, []))
    end = "<|end_of_text|>"
    model.add_special_tokens([end])
    model.save(str(other))
    message = f"did you mean '{end}'? (set --end-of-text to one of: {end})"
    yield f"--text {good} --tokenizer {other}", message
    yield f"--text {good} --tokenizer {other} --vocabulary 300", "leave it out"
    yield "--text hf:", "use hf:NAME"
    yield "--text hf:a --test-text hf:a::train", "this dataset is also in --text"


def refused(words, folder):
    flag_words = words.replace("--", "").split()
    flags = {
        k.replace("-", "_"): v for k, v in zip(*[iter(flag_words)] * 2, strict=True)
    }
    flags |= {k: float(v) for k, v in flags.items() if k == "held_out"}
    flags |= {k: int(v) for k, v in flags.items() if k == "vocabulary"}
    with pytest.raises(ValueError) as raised:
        text(**flags, data_dir=folder / "data", context=8).load()
    return str(raised.value)


def test_what_cannot_be_used_is_said_in_a_line(tmp_path):
    for words, message in broken(tmp_path):
        refusal = refused(words, tmp_path)
        assert message in refusal and "\n" not in refusal, (words, refusal)


@pytest.mark.parametrize("package", ["tokenizers", "datasets"])
def test_a_package_that_is_missing_is_named(package, tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "some words"}\n')
    monkeypatch.setitem(sys.modules, package, None)
    line = (
        f"--task text needs {package}, which is not installed: run pip install -e "
        "'.[text]' in the checkout of syncalgos"
    )
    assert refused(f"--text {path}", tmp_path).startswith(line)


def test_rows_that_cannot_be_used_are_said_in_a_line(tmp_path):
    pytest.importorskip("datasets")
    path = tmp_path / "rows.jsonl"
    for content, message in {
        b'{"words": "a"}\n': "no column 'text': set --column to one of words",
        b'{"text": 3}\n': "'text' holds int, not text: set --column to a column of",
        b'{"text": "a"}\n{"text": "\xff"}\n': "UnicodeDecodeError: ",
        b'{"text": "a"}\n{"text": \n': "ArrowInvalid: JSON parse error",
    }.items():
        path.write_bytes(content)
        refusal = refused(f"--text {path}", tmp_path)
        assert refusal.startswith(f"--text {path}: {message}") and "\n" not in refusal


# Tokenizers


def test_a_tokenizer_of_ones_own_keeps_all_of_the_text_and_adds_nothing(
    songs, tmp_path
):
    """Others cut texts, pad them, and put a token before each."""
    trained, plain = make_tokens(find_documents(songs / "b.txt"), tmp_path)
    trained.enable_truncation(5)
    trained.enable_padding(length=200)
    trained.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{END} $A", special_tokens=[(END, trained.token_to_id(END))]
    )
    path = tmp_path / "own.json"
    trained.save(str(path))
    source = find_documents(songs / "b.txt")
    own_tokenizer = tokens.from_file(path, END)
    row = tokens.tokenize_text(source, own_tokenizer, END, None, tmp_path / "own")
    np.testing.assert_array_equal(row.values, plain.values)


def by_words(folder, vocabulary):
    """A file of a tokenizer whose tokens are words, and stand for no bytes."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens([END])
    words.save(path := str(folder / "words.json"))
    return path


def test_bits_per_byte_are_left_out_where_tokens_stand_for_no_bytes(songs, tmp_path):
    path = by_words(tmp_path, {"One": 0, "two": 1, "?": 70_000})
    make_task = partial(text, data_dir=tmp_path, tokenizer=path, context=8)
    task = make_task(str(songs / "b.txt"), width=4, heads=1)
    data = task.load()
    assert not task.mean_figures and data.test.keys() == {"window"}
    assert data.test["window"].dtype == np.uint32  # a number is above 2^16
    params, _ = jax.eval_shape(task.init, jax.random.key(0))
    assert params["tokens"].shape == (70_001, 4)
    other = make_task(str(songs / "a.txt"))
    assert data.sha256 and data.sha256 != other.load().sha256  # a run may go on with it


@pytest.mark.slow
def test_a_shape_of_gpt2_gets_the_vocabulary_of_the_tokenizer(songs, tmp_path):
    make_task = partial(text, str(songs / "b.txt"), tmp_path, model="gpt2-tiny")
    task = make_task(vocabulary=300, context=8, dtype="bfloat16")
    params, _ = jax.eval_shape(task.init, jax.random.key(0))
    sizes = {"tokens": (300, 32), "positions": (8, 32)}
    assert {name: params[name].shape for name in sizes} == sizes
    assert params["blocks"]["qkv"]["b"].shape == (2, 96)
    batch = jax.tree.map(lambda x: x[:2], task.load().test)
    evaluated = partial(task.apply, key=None, train=False)
    means, _ = jax.eval_shape(evaluated, params, (), batch)
    assert means["loss"].shape == (2,)
    with pytest.raises(ValueError, match="--width is set by --model gpt2-tiny"):
        make_task(width=8)
    with pytest.raises(ValueError, match=r"gpt3.*gpt2"):
        make_task(model="gpt3")


# What is kept


def names(folder):
    """The files in a folder, hidden ones too."""
    return sorted(path.name for path in folder.iterdir())


def test_tokens_are_found_again_by_what_the_files_hold(songs, tmp_path, monkeypatch):
    folder = tmp_path / "kept"
    path = songs / "a.txt"
    _, row = make_tokens(find_documents(path), folder)
    kept_names = names(folder)
    moved = path.rename(songs / "z.txt")
    monkeypatch.setattr(tokens.Documents, "pieces", lambda self: 1 / 0)
    assert make_tokens(find_documents(moved), folder)[1].sha256 == row.sha256
    assert names(folder) == kept_names
    monkeypatch.undo()
    old_stat = moved.stat()
    moved.write_bytes(moved.read_bytes()[:-1] + b"!")
    os.utime(moved, ns=(old_stat.st_atime_ns, old_stat.st_mtime_ns))
    assert make_tokens(find_documents(moved), folder)[1].sha256 != row.sha256


@pytest.mark.parametrize("suffix", ["tokens", "json", "tokenizer.json"])
def test_a_kept_file_that_was_cut_is_named(songs, tmp_path, suffix):
    (folder := tmp_path / "kept").mkdir()
    source = find_documents(songs / "a.txt")
    _, row = make_tokens(source, folder)
    old_contents = contents(folder)
    (cut,) = folder.glob(f"{'?' * 32}.{suffix}")
    os.truncate(cut, 10)
    with pytest.raises(ValueError) as raised:
        make_tokens(source, folder)
    message = str(raised.value)
    assert "is damaged: remove " in message and str(cut.with_suffix("")) in message
    assert (
        cut.suffix in message and "--tokenizer" not in message and "\n" not in message
    )
    for name in re.findall(r"\w{32}\.[\w.]+", message):
        (folder / name).unlink()
    assert make_tokens(source, folder)[1].sha256 == row.sha256
    assert contents(folder) == old_contents


@pytest.mark.parametrize("place", [0, -5], ids=["train", "test"])
def test_tokens_that_are_none_of_the_tokenizer_are_refused(songs, tmp_path, place):
    """Its tokens stand for no bytes: there is no table to miss them in."""
    path = by_words(tmp_path, {"x": 0, "?": 1})
    task = text(str(songs / "a.txt"), tmp_path, tokenizer=path, context=8)
    task.load()
    (tokens_path,) = (tmp_path / "text").glob("*.tokens")
    row = np.memmap(tokens_path, np.uint16)
    row[place] = 3
    row.flush()
    os.utime(tokens_path, ns=(0, 0))  # a change that its time shows is seen at once:
    with pytest.raises(ValueError, match=r"\.tokens or .*\.json is damaged: remove b"):
        task.load()
    os.utime(tokens_path.with_suffix(".json"), ns=(0, 0))
    with pytest.raises(ValueError, match=r"\.tokens or .*\.json is damaged: remove b"):
        task.load().train[0]


MAKE = """
import sys
from pathlib import Path
from experiments.data import repeats, tokens
path, folder, first, second = sys.argv[1:]
source, folder = tokens.find_documents("--text", path, "text"), Path(folder)
exec(first)
tokenizer = tokens.train_tokenizer(source, 300, "<|endoftext|>", folder)
exec(second)
tokens.tokenize_text(source, tokenizer, "<|endoftext|>", None, folder)
"""


def process(path, folder, before_tokenizer="", before_tokens=""):
    """A program that makes both files; some code runs before each."""
    return [
        sys.executable,
        "-c",
        MAKE,
        str(path),
        str(folder),
        before_tokenizer,
        before_tokens,
    ]


def contents(folder):
    return {name: (folder / name).read_bytes() for name in names(folder)}


@pytest.fixture
def large(tmp_path):
    path = tmp_path / "large.txt"
    path.write_text(
        "".join(f"{i} is a number, {i % 7} another\n" for i in range(10_000))
    )
    return path


@pytest.mark.slow
def test_two_processes_make_one_file_and_any_number_of_threads_the_same(
    large, tmp_path
):
    shared_folder = tmp_path / "one"
    other_folder = tmp_path / "other"
    command = process(large, shared_folder)
    single = process(large, other_folder), {"RAYON_NUM_THREADS": "1"}
    ended = together([(command, {}), (command, {}), single])
    assert [code for code, _, _ in ended] == [0, 0, 0], ended
    for stage in ("training", "tokenizing"):
        assert sum(stage in x for _, _, x in ended[:2]) == 1
    shared_contents = contents(shared_folder)
    assert shared_contents == contents(other_folder)
    assert len(shared_contents) == 3


def test_a_full_disk_is_said_in_a_line_and_leaves_no_part(large, tmp_path):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (999, 999))"
    folders = [tmp_path / "of-tokenizer", tmp_path / "of-tokens"]
    commands = [
        process(large, folders[0], before_tokenizer=limit),
        process(large, folders[1], before_tokens=limit),
    ]
    ended = together([(words, {}) for words in commands])
    for (code, _, stderr), folder, num_files in zip(
        ended, folders, (0, 1), strict=True
    ):
        assert (code, len(names(folder))) == (1, num_files)
        message = (
            f"ValueError: {folder} cannot be written: File too large: use another "
        )
        assert message in stderr.splitlines()[-1]


# Windows and workers


@pytest.mark.parametrize("length", [9, 10, 16, 17, 100])
def test_windows_predict_each_token_once(length):
    row = np.arange(length, dtype=np.uint16)
    windows = Windows(row, 8, length, np.ones(length, np.int32))
    read = [windows[number] for number in range(len(windows))]
    predicted = np.concatenate([x["window"][1:] for x in read])
    np.testing.assert_array_equal(predicted, row[1 : 1 + len(windows) * 8])
    assert length - 1 - len(predicted) < 8
    assert all(x["bytes"] == 8 for x in read)


def documents(path, numbers):
    """Writes documents, each with its number; returns the words that name them."""
    lines = [json.dumps({"text": f"{x} " * (5 + x % 3)}) for x in numbers]
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def small_text(path, folder, **flags):
    return text(path, data_dir=folder, vocabulary=300, context=2, **flags)


def counts_said(capsys):
    """The numbers of repeated and of all documents, held out and to train on."""
    remarks = capsys.readouterr().err
    held_out = re.search(r"(\d+) of (\d+) held-out documents are also among", remarks)
    train = re.search(r"(\d+) of (\d+) documents to train on are copies", remarks)
    assert held_out and train
    return [tuple(map(int, match.groups())) for match in (held_out, train)]


TRAIN_NUMBERS = [*range(100, 140), 105, 117]
TEST_NUMBERS = [105, 900, 901, 110, 139]


def test_held_out_documents_that_are_also_trained_on_are_counted(tmp_path, capsys):
    pytest.importorskip("datasets")
    path = documents(tmp_path / "train.jsonl", TRAIN_NUMBERS)
    test_text = documents(tmp_path / "test.jsonl", TEST_NUMBERS)
    small_text(path, tmp_path, test_text=test_text).load()
    assert counts_said(capsys) == [(3, 5), (2, 42)]


def test_documents_at_the_end_of_a_text_are_compared_with_those_before(
    tmp_path, capsys
):
    pytest.importorskip("datasets")
    numbers = [*TRAIN_NUMBERS, *TEST_NUMBERS]
    small_text(documents(tmp_path / "x.jsonl", numbers), tmp_path, held_out=0.12).load()
    (repeated, num_test), (_, num_train) = counts_said(capsys)
    assert num_train + num_test == len(numbers)
    train_numbers = numbers[:num_train]
    assert repeated == sum(x in train_numbers for x in numbers[num_train:])


def test_of_documents_that_differ_nothing_is_said(tmp_path, capsys):
    pytest.importorskip("datasets")
    small_text(documents(tmp_path / "x.jsonl", range(60)), tmp_path).load()
    assert "among the documents" not in capsys.readouterr().err


@pytest.mark.parametrize("cut", range(24))
def test_a_document_that_is_cut_is_held_out(cut, monkeypatch):
    """Wherever it is cut; the oracle is the list of documents."""
    monkeypatch.setattr(repeats, "PIECE", 5)
    words = [[1, 2, 3], [], [4], [1, 2, 3], [5, 6], [4], [7, 8], [1, 2, 3]]
    tokens_and_ends = itertools.chain.from_iterable([*word, 0] for word in words)
    row = np.array([*tokens_and_ends], np.uint16)
    ends = np.cumsum([len(word) + 1 for word in words]) - 1
    train_words = []
    test_words = []
    for word, end in zip(words, ends, strict=True):
        if word:
            (train_words if end < cut else test_words).append(word)
    counts = repeats.count_repeated_documents(row[:cut], row[cut:], 0, True)
    assert counts is not None
    assert (counts.num_train, counts.num_test) == (len(train_words), len(test_words))
    assert counts.num_test_repeated == sum(w in train_words for w in test_words)
    copies = sum(w in train_words[:i] for i, w in enumerate(train_words))
    assert counts.num_train_repeated == copies


# Runs


TINY = "--task text --vocabulary 300 --context 16 --width 16 --layers 1 --heads 2"
TINY += " --workers 2 --algo bmuf --period 4 --steps 12 --eval-every 4"
TINY += " --checkpoint-every 4 --dispatch-steps 1"


def command(path, folder):
    return f"{TINY} --text {path} --data-dir {folder}"


@pytest.mark.slow
def test_bits_per_byte_are_those_of_the_held_out_text(songs, tmp_path, capsys):
    """Counted from the exported model, and from the text's own bytes."""
    path = songs / "a.txt"
    out = tmp_path / "out"
    model = tmp_path / "model.safetensors"
    words = f"{command(path, tmp_path)} --export {model} --out {out}"
    assert run.main(words.split()) == 0
    (tokenizer_path,) = (tmp_path / "text").glob("*.tokens")
    row = np.fromfile(tokenizer_path, np.uint16).astype(int)
    test = row[int(len(row) * 0.9) :]
    windows = np.stack([test[i : i + 17] for i in range(0, len(test) - 16, 16)])
    logits = np.float64(gpt.apply(load(model).params, windows[:, :-1], 2))
    targets = windows[:, 1:]
    largest = logits.max(-1, keepdims=True)
    total = np.log(np.exp(logits - largest).sum(-1)) + largest[..., 0]
    nats = total - np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    (tokenizer_path,) = (tmp_path / "text").glob("*.tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_path))
    first_target = len(row) - len(test) + 1
    last_target = first_target + nats.size
    num_bytes_before = len(tokenizer.decode(row[:first_target]).encode())
    num_bytes = len(tokenizer.decode(row[:last_target]).encode()) - num_bytes_before
    expected = nats.sum() / np.log(2) / num_bytes
    summary = json.loads((out / "summary.json").read_text())
    assert summary["test_loss"] == pytest.approx(nats.mean(), rel=1e-5)
    assert summary["test_bits_per_byte"] == pytest.approx(expected, rel=1e-5)
    assert f"test bits per byte    {expected:.4f}" in capsys.readouterr().out
