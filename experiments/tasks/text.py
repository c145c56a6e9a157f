"""The next token of any text, from files or from streamed datasets."""

import hashlib
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from experiments.command.stopping import say
from experiments.data import downloads, tokens
from experiments.data.repeats import count_repeated_documents
from experiments.data.tokens import Documents, byte_counts, find_documents
from experiments.tasks.language import check_sizes, fields
from experiments.tasks.task import Data, Task
from models import gpt
from syncalgos import checks

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MOST_HELD_OUT = 2**26  # tokens, all of which each device holds in an evaluation


def text(
    text: str,
    data_dir: Path | None = None,
    test_text: str | None = None,
    held_out: float | None = None,
    column: str = "text",
    tokenizer: str | None = None,
    vocabulary: int | None = None,
    end_of_text: str = "<|endoftext|>",
    tokens: int | None = None,
    model: str | None = None,
    context: int | None = None,
    width: int | None = None,
    layers: int | None = None,
    heads: int | None = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
    remat: bool = False,
) -> Task:
    """The next token of any text, from files or a dataset of Hugging Face.

    The text is tokenized once, into a file in the data folder. Documents are joined, so
    that attention crosses their ends, as in GPT-2.

    Args:
        text: paths or globs, separated by commas, or a dataset: hf:NAME, hf:NAME:CONFIG
            or hf:NAME:CONFIG:SPLIT. Each plain file is one document, and so is each row
            of a .jsonl or .parquet file.
        data_dir: folder of data sets.
        test_text: held-out text, in the form of --text; none means the end of --text.
        held_out: the share at the end of --text that is held out; none means 0.1.
        column: the column with the text, in a dataset or a .jsonl or .parquet file.
        tokenizer: a tokenizer.json; none means that one is trained on the text.
        vocabulary: number of tokens of a trained tokenizer; none means 4096.
        end_of_text: the special token that follows each document.
        tokens: number of tokens of --text to use; none means all.
        model: a shape of models.gpt.SHAPES, such as gpt2, with the vocabulary of the
            tokenizer; none means a small GPT without biases of queries and keys.
        context: tokens that the model sees; none means 128, or the context of --model.
        width: width of the model; none means 128, or the width of --model.
        layers: number of blocks; none means 4, or the number of --model.
        heads: number of attention heads, which divides the width; none means 4, or the
            number of --model.
        dtype: type of products and activations; params, norms and softmax are float32.
        remat: recompute blocks for the gradient, to save memory.

    Source: Radford et al., "Language models are unsupervised multitask learners", 2019.
    """
    if tokens is not None:
        checks.whole("--tokens", tokens, least=1)
    if test_text is not None and held_out is not None:
        raise ValueError("--held-out and --test-text exclude each other: use only one")
    share = 0.0
    if test_text is None:
        share = 0.1 if held_out is None else held_out
        checks.real("--held-out", share, above=0, below=1)
    user_tokenizer, size = _tokenizer(tokenizer, vocabulary, end_of_text)
    sizes = {"context": context, "width": width, "layers": layers, "heads": heads}
    # The tokens of a tokenizer that is trained here stand for bytes.
    are_bytes = user_tokenizer is None or byte_counts(user_tokenizer) is not None
    init, length, heads = _model(model, size, sizes)
    texts = [find_documents("--text", text, column)]
    if test_text is not None:
        texts.append(find_documents("--test-text", test_text, column))
        train_sources, test_sources = map(_sources, texts)
        shared_sources = train_sources & test_sources
        if shared_sources:
            source = "this dataset" if texts[1].hub else min(shared_sources)
            raise ValueError(
                f"--test-text {test_text}: {source} is also in --text: hold out other "
                "text"
            )

    return Task(
        **fields(init, heads, remat, dtype),
        load=partial(
            _load,
            data_dir,
            texts,
            user_tokenizer,
            size,
            end_of_text,
            tokens,
            share,
            length,
        ),
        batch_size=16,
        steps=400,
        lr={"sgd": 0.1, "": 2e-3},
        eval_batch=64,
        mean_figures={"bits_per_byte": _bits_per_byte} if are_bytes else {},
    )


def _sources(documents: Documents) -> set[Any]:
    """Returns the files of documents, or their dataset."""
    if documents.hub:
        return {documents.hub}
    return {path.resolve() for path in documents.files}


def _model(
    model: str | None, vocabulary: int, sizes: Mapping[str, int | None]
) -> tuple[Callable[[Any], Any], int, int]:
    """Returns a function that draws a model's params, its context and its heads."""
    user_sizes = {name: x for name, x in sizes.items() if x is not None}
    if model is None:
        gpt_sizes = {"context": 128, "width": 128, "layers": 4, "heads": 4} | user_sizes
        check_sizes(**gpt_sizes)
        heads = gpt_sizes.pop("heads")
        init = partial(gpt.init, vocabulary=vocabulary, **gpt_sizes)
        return init, gpt_sizes["context"], heads
    checks.one_of("--model", model, gpt.SHAPES)
    fixed_sizes = user_sizes.keys() - {"context"}
    if fixed_sizes:
        raise ValueError(
            f"--{min(fixed_sizes)} is set by --model {model}: leave it out"
        )
    shape = gpt.SHAPES[model]._replace(vocabulary=vocabulary, **user_sizes)
    checks.whole("--context", shape.context, least=1)
    return shape.init, shape.context, shape.heads


class Windows:
    """Windows of a row of tokens that need not fit in memory.

    The first token of a window is the last token of the one before, so that each token
    is predicted once. The end that does not fill a window is left out.
    """

    def __init__(
        self, row: np.ndarray, context: int, size: int, counts: np.ndarray | None
    ):
        self.row = row
        self.context = context
        self.size = size
        self.counts = counts

    def __len__(self) -> int:
        return (len(self.row) - 1) // self.context

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        """Reads one window, and the bytes of the tokens to predict."""
        start = number * self.context
        window = np.array(self.row[start : start + self.context + 1])
        # Checked here: a check of the whole file would read it at each start.
        if window.max() >= self.size:
            assert isinstance(self.row, np.memmap)
            raise tokens.make_damage_error(Path(self.row.filename or ""))
        if self.counts is None:
            return {"window": window}
        return {"window": window, "bytes": self.counts[window[1:]].sum(dtype=np.int32)}


def _bits_per_byte(means: Mapping[str, float]) -> float:
    """Returns bits per byte of the text, which compares models across tokenizers."""
    return means["loss"] / math.log(2) / means["bytes_per_token"]


def _tokenizer(
    path: str | None, vocabulary: int | None, end: str
) -> "tuple[Tokenizer | None, int]":
    """Reads the given tokenizer, if any; returns it and the number of tokens."""
    if path is None:
        size = 4096 if vocabulary is None else vocabulary
        return None, checks.whole("--vocabulary", size, least=tokens.LEAST)
    if vocabulary is not None:
        raise ValueError(f"--vocabulary is set by --tokenizer {path}: leave it out")
    tokenizer = tokens.from_file(Path(path), end)
    return tokenizer, tokens.vocabulary_size(tokenizer)


def _load(
    data_dir: Path | None,
    texts: list[Documents],
    tokenizer: "Tokenizer | None",
    size: int,
    end: str,
    limit: int | None,
    share: float,
    context: int,
) -> Data:
    """Tokenizes the texts, if not yet done, and cuts them into windows."""
    folder = downloads.folder(data_dir) / "text"
    if tokenizer is None:
        tokenizer = tokens.train_tokenizer(texts[0], size, end, folder)
    # All of the held-out text is used.
    token_limits = (limit, None)
    parts = [
        tokens.tokenize_text(documents, tokenizer, end, token_limit, folder)
        for documents, token_limit in zip(texts, token_limits, strict=False)
    ]
    rows = [part.values for part in parts]
    if len(rows) == 1:
        cut = int(len(rows[0]) * (1 - share))
        rows = [rows[0][:cut], rows[0][cut:]]
    if len(rows[1]) > MOST_HELD_OUT:
        raise ValueError(
            f"{len(rows[1])} held-out tokens are more than {MOST_HELD_OUT}, which an "
            "evaluation takes: lower --held-out, or give a shorter --test-text"
        )
    for name, row in zip(("to train on", "held out"), rows, strict=True):
        if len(row) <= context:
            raise ValueError(
                f"--text: {len(row)} tokens {name} are fewer than a window of "
                f"--context {context} and the next token: use a smaller --context, or "
                "more text"
            )
    train_row, test_row = rows
    end_token = tokenizer.token_to_id(end)
    assert end_token is not None  # the tokenizer was checked for it
    _remark_repeats(train_row, test_row, end_token, is_one_text=len(texts) == 1)
    counts = byte_counts(tokenizer)
    size = tokens.vocabulary_size(tokenizer)  # fewer, if the text is too short
    train, test = (Windows(row, context, size, counts) for row in rows)
    examples = [test[number] for number in range(len(test))]
    test_arrays = {}
    for name in examples[0]:
        test_arrays[name] = np.stack([example[name] for example in examples])
    return Data(
        train=train,
        test=test_arrays,
        overlapping=1,
        sha256=hashlib.sha256(
            "".join(part.sha256 for part in parts).encode()
        ).hexdigest(),
    )


def _remark_repeats(
    train: np.ndarray, test: np.ndarray, end: int, is_one_text: bool
) -> None:
    """Says how many documents stand in both parts, or several times in the first."""
    counts = count_repeated_documents(train, test, end, is_one_text)
    if counts is None:
        say(
            "task text: the text is too long to look for documents that are repeated: "
            "make sure that held-out documents are not among those to train on"
        )
        return
    if counts.num_test_repeated:
        say(
            f"task text: {counts.num_test_repeated} of {counts.num_test} held-out "
            "documents are also among the documents to train on, so that the held-out "
            "loss does not show how the model does on new text: remove copies from the "
            "text"
        )
    if counts.num_train_repeated:
        say(
            f"task text: {counts.num_train_repeated} of {counts.num_train} documents "
            "to train on are copies of others, so that a part of them that is held out "
            "by --validation is not new: remove copies from the text"
        )
