"""A neural n-gram language model with tables of words, trained by sampled softmax."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from models.draws import normal

Params = dict[str, Any]
Lookup = Callable[[Any, jax.Array], jax.Array]


def rows(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Reads the rows of a table: ids' shape, then a row's."""
    return table[ids]


def init(key: Any, vocabulary: int, width: int, order: int) -> Params:
    """Draws weights to predict a word from the `order` - 1 words before it.

    Returns:
        {"words": (vocabulary, width), the input table; "hidden": {"w":
        ((order - 1) width, width), "b": (width,)}; "outputs": (vocabulary, width), the
        output table; "bias": (vocabulary,), of outputs}. The tables are normal with
        standard deviation 0.1, w with variance 1 / rows; biases are zero.

    Raises:
        ValueError: an order that leaves no words to predict from.
    """
    if order < 2:
        raise ValueError(f"ngram: order must be at least 2, got {order}")
    shapes = [(vocabulary, width), ((order - 1) * width, width), (vocabulary, width)]
    words, w, outputs = normal(key, shapes)
    return {
        "words": 0.1 * words,
        "hidden": {"w": w / len(w) ** 0.5, "b": jnp.zeros(width)},
        "outputs": 0.1 * outputs,
        "bias": jnp.zeros(vocabulary),
    }


def features(params: Params, contexts: jax.Array, lookup: Lookup = rows) -> jax.Array:
    """Computes features of contexts: a layer of tanh over their words' rows.

    Args:
        params: weights of `init`.
        contexts: int32, (batch, order - 1), the words before, in their order.
        lookup: how rows are read; another function reads tables that lie in parts.

    Returns:
        (batch, width).

    Source: Bengio et al., "A neural probabilistic language model", 2003.
    """
    words = lookup(params["words"], contexts)  # (batch, order - 1, width)
    hidden = params["hidden"]
    return jnp.tanh(words.reshape(len(contexts), -1) @ hidden["w"] + hidden["b"])


def logits(params: Params, contexts: jax.Array) -> jax.Array:
    """Computes the logits of all words after contexts, (batch, vocabulary)."""
    return features(params, contexts) @ params["outputs"].T + params["bias"]


def full_loss(params: Params, contexts: jax.Array, targets: jax.Array) -> jax.Array:
    """Computes the cross-entropy of targets, (batch,), by the full softmax."""
    scores = logits(params, contexts)
    target_logits = jnp.take_along_axis(scores, targets[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(scores, axis=1) - target_logits


def sampled_loss(
    params: Params,
    contexts: jax.Array,
    targets: jax.Array,
    negatives: jax.Array,
    log_q: jax.Array,
    lookup: Lookup = rows,
) -> jax.Array:
    """Estimates `full_loss` from a few words drawn for the whole batch.

    The sum of the softmax over words' logits s becomes, with k negatives,

        exp(s_target) + sum of exp(s_j) / (k q_j) over negatives j other than the target

    which is the full sum in expectation. The target is not drawn: its weight is one.

    Args:
        params: weights of `init`.
        contexts: int32, (batch, order - 1), the words before.
        targets: int32, (batch,), the words that came next.
        negatives: int32, (k,), drawn alike and with repeats, or all distinct.
        log_q: (vocabulary,), log q: a word's expected count among negatives, over k.
        lookup: how rows are read; another function reads tables that lie in parts. Of
            each table all rows are read at once.

    Returns:
        (batch,). Gradients of the tables are zero in rows that are not read.

    Source: Bengio and Senécal, "Adaptive importance sampling to accelerate training of
    a neural probabilistic language model", 2008; Jean et al., "On using very large
    target vocabulary for neural machine translation", 2015.
    """
    batch = len(targets)
    k = len(negatives)
    ids = jnp.concatenate([targets, negatives])
    outputs = lookup(params["outputs"], ids)  # (batch + k, width)
    bias = lookup(params["bias"], ids)
    hidden = features(params, contexts, lookup)
    target_logits = (hidden * outputs[:batch]).sum(1) + bias[:batch]
    negative_logits = hidden @ outputs[batch:].T + bias[batch:]  # (batch, k)
    # The negatives alone: with the target corrected as well, a fitted unigram model
    # gives the first word of Zipf's law 0.229 instead of 0.193.
    corrected_logits = negative_logits - (jnp.asarray(log_q)[negatives] + math.log(k))
    is_target = negatives == targets[:, None]
    corrected_logits = jnp.where(is_target, -jnp.inf, corrected_logits)
    scores = jnp.concatenate([target_logits[:, None], corrected_logits], axis=1)
    return jax.nn.logsumexp(scores, axis=1) - target_logits
