"""Word embeddings of a neural n-gram model of Shakespeare's text."""

import math
from functools import partial
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from experiments.data import tokens
from experiments.tasks.classify import muon_axes, values
from experiments.tasks.task import Data, Tables, Task
from models import ngram
from syncalgos import checks, collectives, lookup
from syncalgos.collectives import WORKERS, Axis

WORDS = 12_631
TABLES = {"words": "words", "outputs": "outputs", "bias": "outputs"}
NAMES = {**TABLES, "hidden": False}

# Zipf's law: word r, sorted by frequency from 0, is drawn with a probability
# proportional to log((r + 2) / (r + 1)), so that no counts are needed.
LOG_Q = np.log(np.log1p(1 / (1 + np.arange(WORDS))) / np.log(WORDS + 1))


def embeddings(
    data_dir: Path | None = None,
    model: Literal["ngram"] = "ngram",
    order: int = 5,
    width: int = 64,
    negatives: int = 64,
    tables: Literal["replicated", "shared", "sharded"] = "replicated",
    workers: int = 1,
    axis: Axis = WORKERS,
) -> Task:
    """The next word of Shakespeare's text, of 12,631, the last tenth held out.

    Training uses sampled softmax, evaluation the full softmax. There are two tables of
    word vectors. `words` is read at the previous words. `outputs`, with its bias, is
    read at the next word and at negatives, which are drawn by Zipf's law.

    Args:
        data_dir: folder of data sets.
        model: ngram, a neural n-gram model.
        order: number of words in an n-gram; the last one is predicted.
        width: size of a word's vector.
        negatives: words drawn for each worker's batch; 0 means the full softmax.
        tables: replicated on all workers; shared, one table updated with the mean
            gradient at every step for any algorithm; or sharded, with some rows on each
            worker.
        workers: the number of workers, into which sharded tables are split.
        axis: the axis of the workers.

    Source: Bengio et al., "A neural probabilistic language model", JMLR 2003.
    """
    checks.whole("--order", order, least=2)
    checks.whole("--width", width, least=1)
    checks.whole("--negatives", negatives, least=0)
    sharded = tables == "sharded"
    if sharded and not negatives:
        raise ValueError("--negatives 0 needs whole tables: use --tables replicated")
    # Whole tables are read without communication.
    read = partial(lookup, axis=axis) if sharded else ngram.rows

    def apply(params, buffers, batch, key, train):
        contexts = batch["ngram"][:, :-1]
        targets = batch["ngram"][:, -1]
        if train and negatives:
            drawn = _draw(key, negatives)
            log_q = jnp.asarray(LOG_Q, jnp.float32)
            loss = ngram.sampled_loss(params, contexts, targets, drawn, log_q, read)
            return {"loss": loss}, buffers
        # The full softmax reads all rows: only evaluations need this communication.
        whole_params = _gather_table(params, axis) if sharded else params
        return values(ngram.logits(whole_params, contexts), targets), buffers

    def init(key):
        drawn = ngram.init(key, WORDS, width, order)
        return _pad_tables(drawn, workers if sharded else 1), ()

    def touched_rows(examples):
        outputs = examples + negatives if negatives else WORDS
        return {"words": examples * (order - 1), "outputs": outputs}

    return Task(
        init=init,
        apply=apply,
        load=partial(_load, data_dir, order),
        batch_size=256,
        steps=1000,
        lr={"sgd": 1.0, "": 1e-3},
        dispatch_steps=16,
        eval_batch=1024,
        figures={"perplexity": math.exp},
        tables=Tables(NAMES, touched_rows, tables),
        sends="look-ups in the sharded tables" if sharded else "",
        muon=muon_axes,
    )


def _draw(key: jax.Array, count: int) -> jax.Array:
    """Draws words by Zipf's law, (count,) int32."""
    u = jax.random.uniform(key, (count,))
    drawn = jnp.exp(u * math.log(WORDS + 1)).astype(jnp.int32) - 1
    return jnp.clip(drawn, 0, WORDS - 1)


def _pad_tables(params, parts: int):
    """Pads tables with unused rows of zeros to a multiple of parts."""

    # All workers have the same number of rows of a sharded table.
    def pad(table):
        return jnp.pad(table, [(0, -WORDS % parts)] + [(0, 0)] * (table.ndim - 1))

    return {name: pad(x) if name in TABLES else x for name, x in params.items()}


def _gather_table(params, axis: Axis):
    """Gathers the tables from the workers' parts, without their padding."""

    def join(part):
        return collectives.gather(part, axis).reshape(-1, *part.shape[1:])[:WORDS]

    return {name: join(x) if name in TABLES else x for name, x in params.items()}


def _load(data_dir: Path | None, order: int) -> Data:
    codes, vocabulary = tokens.words(tokens.shakespeare(data_dir))
    # The tables are made before the text is read.
    assert len(vocabulary) == WORDS
    train, test = tokens.split(codes)
    if order > len(test):
        raise ValueError(
            f"--order {order} is longer than the held-out text ({len(test)} words): "
            f"use at most {len(test)}"
        )
    return Data(
        train={"ngram": tokens.windows(train, order)},
        test={"ngram": tokens.windows(test, order)},
        overlapping=order - 1,
    )
