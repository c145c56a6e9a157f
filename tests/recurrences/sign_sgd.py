"""Karimireddy 2019, algorithm 2 (EF-signSGD); majority: Bernstein 2018, algorithm 3."""

from math import ceil

import numpy as np

from recurrences import SIZES, START, by_leaf, draw_key, in_step, leaf_draws, mean

DRAWN = {"zeros_drawn": True}
NO_TIES = {"workers": 3}
SETTINGS = [{}, ({"majority": True}, NO_TIES), ({"majority": True, "seed": 3}, DRAWN)]


def scaled_sign(number, x):
    return np.mean(np.abs(x)) * np.sign(x)


def drawn_sign(x, draws):
    return np.where(x == 0, np.where(draws[: x.size] < 0.5, 1.0, -1.0), np.sign(x))


def voted(vectors, step, seed, zeros_drawn, majority=True):
    """The sign of most of the workers' vectors; or their mean sign.

    `zeros_drawn`: the sign of 0, and that of a tie, is drawn, + or -.
    """
    if not zeros_drawn:
        votes = mean(np.sign(vectors))
        return np.sign(votes) if majority else votes
    workers = len(vectors)
    part_sizes = [ceil(size / workers) for size in SIZES]  # whose votes one counts
    counts = [(workers + 1) * size for size in part_sizes]
    draws = [leaf_draws(draw_key(seed, step, i), counts) for i in range(workers)]

    def counted(number, *leaves):
        """Worker j counts the votes on part j of all leaves, and draws at a tie."""
        size = part_sizes[number]
        result = []
        u = [draws[i][number].reshape(-1, size) for i in range(workers)]
        for j in range(workers):
            parts = [x.ravel()[j * size : (j + 1) * size] for x in leaves]
            votes = mean([drawn_sign(x, u[i][j]) for i, x in enumerate(parts)])
            result.append(drawn_sign(votes, u[j][workers]) if majority else votes)
        return np.concatenate(result)

    return by_leaf(counted, *vectors)


def recurrence(workers, majority=False, seed=0, zeros_drawn=False):
    residual = [np.zeros_like(START)] * workers

    def vote(grads, theta, step):
        return [voted(grads, step, seed, zeros_drawn)] * workers

    def scaled(grads, theta, step):
        x = [grads[i] + residual[i] for i in range(workers)]
        d = [by_leaf(scaled_sign, x[i]) for i in range(workers)]
        residual[:] = [x[i] - d[i] for i in range(workers)]
        return [mean(d)] * workers

    return in_step(workers, vote if majority else scaled)
