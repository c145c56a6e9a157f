"""Refusals of data, its readers and the models: each in one line.

A new row is a call, which gets an empty folder, and words that the line must hold.
What a user's own task may have wrong is in test_task_contract.py.
"""

import gzip
import lzma
import os
import pickle

import jax
import numpy as np
import pytest
from support.formats import batch, cifar_archive, put, python2, tar

from experiments.data import feeding, formats, sampling
from experiments.data.feeding import check_data
from experiments.tasks.language import gpt2_synthetic
from experiments.tasks.table import table
from experiments.tasks.task import Data
from models import gpt, lstm, ngram

ROWS = np.random.default_rng(0).normal(3.0, 2.0, (100, 2))
KINDS = np.where(ROWS.sum(1) > 6, "high", "low")
Y = (KINDS == "low").astype(int)
N = 1000
LABELS = np.arange(N) % 7
GROUPS = {"label": LABELS}
KEY = jax.random.key(0)
GPT = gpt.init(KEY, vocabulary=5, context=7, width=8, layers=1)
ROTARY = gpt.Shape(5, 7, 6, 1, 2, 3, rotary=True).init(KEY)


def archive(content):
    def read(folder):
        file = put(folder, "inside/archive", content)
        formats.members(folder / file.path, 1 << 20, "it")

    return read


def batches(content):
    """Reads an archive of a good batch and of one with this content."""

    def read(folder):
        contents = {"data_batch_1": batch(2, 1)[0], "test_batch": content(folder)}
        formats.read_cifar(cifar_archive(folder / "inside", contents))

    return read


def held_out(content):
    return batches(lambda folder: content)


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


def evil(folder):
    return pickle.dumps(MakesFolder(str(folder / "evil")), protocol=2)


def of_numpy(folder):
    return pickle.dumps({"data": CallsNumPy(), "labels": []}, protocol=2)


def csv(content, **flags):
    content = content.encode(errors="surrogateescape")
    return lambda folder: table(
        str(folder / put(folder, "data.CSV", content).path), **flags
    )


def npz(x, y=None, **other_arrays):
    arrays = {"x": x, **({} if y is None else {"y": y}), **other_arrays}

    def read(folder):
        np.savez(folder / "data.npz", **arrays)
        table(str(folder / "data.npz"))

    return read


def no_npz(content):
    return lambda folder: table(str(folder / put(folder, "data.npz", content).path))


def shards(kind, groups=GROUPS, workers=8):
    return lambda folder: sampling.shards(kind, groups, N, workers, 0)


def data(train=None, **fields):
    """Data whose examples are their own numbers."""
    train = {"number": np.arange(N)} if train is None else train
    return Data(train, {"number": np.array([-1])}, **fields)


def split(share, **fields):
    return lambda folder: feeding.split(data(**fields), share)


def checked(**fields):
    return lambda folder: check_data(data(**fields))


SOURCE = [{"number": np.asarray(i)} for i in range(N)]
GOOD = tar({"a": os.urandom(5000)})
ZIPPED = gzip.compress(GOOD)
UNREADABLE = "it is not a readable tar archive"
NO_PICKLE = "test_batch cannot be unpickled"
NO_CLASS = "is neither a whole number nor a word"
NOT_NUMPY = "data.npz is neither a .csv file nor an .npz file"
SHARE = "above 0 and below 1"

REFUSED = [
    # Archives.
    (archive(gzip.compress(bytes(2 << 20))), "it unpacks to more than 1048576 bytes"),
    (archive(GOOD[:2000]), UNREADABLE),
    (archive(ZIPPED[:-1000]), UNREADABLE),
    (archive(ZIPPED[:-8] + bytes(8)), UNREADABLE),  # its checksum
    (archive(b""), UNREADABLE),
    (archive(lzma.compress(GOOD)), UNREADABLE),
    (archive(gzip.compress(ZIPPED)), UNREADABLE),
    # Pickles: nothing is called.
    (batches(evil), "cifar.tar.gz: | test_batch | it asks for "),
    (batches(of_numpy), "it asks for numpy"),
    (held_out(b"not a pickle"), f"cifar.tar.gz: cifar-10-batches-py/{NO_PICKLE}"),
    (held_out(batch(2, 0)[0][:-100]), NO_PICKLE),
    (held_out(python2({"data": "x", "labels": ["cat"]})), NO_PICKLE),
    (held_out(python2({"data": "x", "labels": [1]})), NO_PICKLE),
    # Tables of one's own.
    (csv("a,b\n1,x\nmuch,y\n"), "line 3: column 'a' has 'much' among numbers"),
    (csv("kind,a,b\n1,5,cat\ncat,5\n"), "line 3: 2 columns, but 3 in the first line"),
    (csv("a,kind\n1,0\n\n2,1,\n"), "line 4: 3 columns, but 2 in the first line"),
    (csv("a,kind\n1,5\n2,0.25\n"), f"line 3: the class '0.25' {NO_CLASS}: give"),
    (csv("a,kind\n1,x\n2,\n"), f"the class '' {NO_CLASS}: remove | there are 1, or"),
    (csv("a,kind\n1,0\n2,nan\n"), f"line 3: the class 'nan' {NO_CLASS}"),
    (csv("a,kind\n1,x\n2,x\n"), "data.CSV: all rows have the same class, x: add"),
    (csv("a,kind\n1,x\n1e999,y\n"), "line 3: column 'a' has '1e999' | no finite"),
    (csv("a,kind\n1,x\n-inf,y\n"), "'-inf', which is no finite number: write a"),
    (csv("a,kind\n1,x\n1_0,y\n"), "line 3: column 'a' has '1_0', a number in an"),
    (csv('a,kind\n5,x\n"1,234",y\n'), "has '1,234', a number in another form: write"),
    (csv("a,kind\n$5.20,x\n4,y\n"), "line 2: column 'a' has '$5.20', a number in an"),
    (csv("a,kind\n5 %,x\n20 %,y\n"), "line 2: column 'a' has '5 %', a number in an"),
    (csv("a;kind\n1.234,5;x\n8;y\n"), "line 2: column 'a' has '1.234,5', a number"),
    (csv("a,kind\ntrue,x\n2,y\n"), "line 2: column 'a' has 'true' among numbers"),
    (
        csv("a,kind\n" + "1e308,x\n-1e308,y\n" * 5),
        "'a' has numbers that are too far apart: write their logarithms",
    ),
    (csv("a, a,kind\n1,2,x\n"), "the header has 'a' twice: rename one"),
    (csv("7,3,dog\n" + "5,1,cat\n9,8,ant\n" * 9), "'7,3,dog', may be a row or the n"),
    (
        csv("a,b,kind\n" + "".join(f"{i},w{i},{i % 2}\n" for i in range(20))),
        "has no column to learn from ( | own number there | ): add a column of numbers",
    ),
    (
        csv('a,kind\n1,x\n2,"y\n3,x\n'),
        "is not a .csv file in UTF-8: unexpected end of data: save it",
    ),
    (
        csv("a,kind\n1,x\n", hidden=8, model="lenet"),
        "--hidden is for --model mlp, not for lenet",
    ),
    (
        csv("a,kind\n" + "1,x\n2,y\n" * 9, model="lenet"),
        "holds no pictures, but x (18, 1): use --model mlp",
    ),
    (csv("a,kind\n1,x\n2,y\n"), "data.CSV: 0 of 2 rows are held out"),
    (csv("a,kind\n"), "data.CSV holds no rows of numbers: add"),
    (csv(""), "two columns or more, separated by commas, semicolons or tabs, got ''"),
    (csv("a kind\n1 x\n"), "must have two columns or more | got 'a kind' in its first"),
    (
        csv("a,kind\n1,\udcff\n"),
        "is not a .csv file in UTF-8: | can't decode byte 0xff",
    ),
    (csv("a,kind\n1,x\n2,y\n", column="c"), "'c': | data.CSV has a, kind"),
    (csv("", hidden=0), "--hidden must be a whole number of at least 1"),
    (npz(ROWS), "data.npz has no y (it has: x)"),
    (npz(ROWS, np.eye(2)[Y]), "data.npz: y must have shape (100,), a class for each"),
    (npz(ROWS, Y, x_test=ROWS), "has no y_test (it has: x, y, x_test)"),
    (npz(ROWS, Y, y_test=Y), "has no x_test (it has: x, y, y_test)"),
    (
        npz(ROWS, Y, x_test=ROWS[:, :1], y_test=Y),
        "x_test must be numbers, (examples, 2), all of one type, got float64 (100, 1)",
    ),
    (npz(ROWS, Y, x_test=ROWS[:0], y_test=Y[:0]), "0 of 100 rows are held out"),
    (npz(KINDS, Y), "x must be numbers, (examples), all of one type, got <U4 (100,)"),
    (npz(ROWS, np.where(Y, np.nan, 1)), f"data.npz: the class 'nan' {NO_CLASS}"),
    (npz(ROWS, Y * 0), "all rows have the same class, 0"),
    (npz(ROWS, KINDS.astype(object)), NOT_NUMPY),
    (no_npz(b""), NOT_NUMPY),
    (no_npz(b"\x93NUMPY"), NOT_NUMPY),
    (no_npz(b"PK\3\4"), NOT_NUMPY),
    # Partitions.
    (shards("lable"), "lable | mean 'label' | iid, label, dirich"),
    (shards("label", {}), "--partition label | by label | (possible here: iid)"),
    (shards("dirichlet:1", {}), "--partition dirichlet:1 | by label | here: iid)"),
    (shards("label", workers=1001), "1000 examples | 1001 workers | at most 1000"),
    (shards("dirichlet:1", workers=101), "101 workers | 10 each | at most 100"),
    (shards("dirichlet:0.001", workers=40), "1000 draws | 40 workers | larger ALPHA"),
    # Parts that are held out.
    (split(1.0), f"{SHARE} | got 1.0"),
    (split(1e-4), "0.0001 of 1000 | 1000 to train on and 0 to validate on"),
    (split(0.9, overlapping=100), "0 to train on and 900 to validate on"),
    (checked(groups={"label": LABELS[1:]}), "groups must hold | (1000,) | 'label'"),
    (checked(train=SOURCE, groups={"label": LABELS[1:]}), "groups must hold"),
    (checked(groups={"who": LABELS / 2}), "whole numbers | got 'who' of float64"),
    (checked(overlapping=-1), "overlapping must be | at least 0, got -1"),
    (checked(covering=0), "covering must be | at least 1, got 0"),
    # Models.
    (
        lambda folder: gpt.apply(GPT, np.zeros((1, 8), int), 2),
        "gpt: 8 tokens are longer than the context of 7",
    ),
    (
        lambda folder: gpt.apply(GPT, np.zeros((1, 6), int), 3),
        "gpt: a width of 8 does not divide into 3 heads",
    ),
    (
        lambda folder: gpt.apply(ROTARY, np.zeros((1, 6), int), 2),
        "gpt: rotary heads need | size, not 3",
    ),
    (lambda folder: gpt2_synthetic("gtp2"), "--model 'gtp2'; did you mean 'gpt2'"),
    (
        lambda folder: lstm.apply(lstm.init(KEY, 3, 4, 2), np.zeros((2, 5, 3)), 0),
        "lstm: remat_chunk must be at least 1, got 0",
    ),
    (lambda folder: ngram.init(KEY, 9, 4, order=1), "ngram: order must be at least 2"),
]


@pytest.mark.parametrize(
    ("call", "words"), REFUSED, ids=[words for _, words in REFUSED]
)
def test_what_is_refused_is_told_in_a_line(call, words, tmp_path):
    with pytest.raises(ValueError) as raised:
        call(tmp_path)
    message = str(raised.value)
    assert "\n" not in message
    for part in words.split(" | "):
        assert part in message
    assert not (tmp_path / "evil").exists()


def test_the_evil_pickle_would_have_worked(tmp_path):
    pickle.loads(evil(tmp_path))
    assert (tmp_path / "evil").is_dir()
