"""Five published methods as compositions of the library's parts, to copy.

Each function works with `--algo compositions:NAME` in this folder (but `saps_psgd`,
which needs matchings): its numbers become flags. The program prints what each sends.
tests/library/test_published_compositions.py compares each with its paper's update.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

import syncalgos
from syncalgos import Strategy, chain, collectives, decided, delayed, every, masked

# LOSCAR-SGD. Source: Maziane et al., "LOSCAR-SGD: local SGD with
# communication-computation overlap and delay-corrected sparse model averaging", 2026.
#
#     θ[M] ← θ[M] + mean(y[M]) - y[M]    `delay` steps after y[M] was sent
#
# M are random entries, the same on all workers. Here, M has a fixed number of entries
# in each leaf; in the paper, in the whole model. `paced(loscar(), (16, 16, 12, 8))`
# gives four workers different numbers of local steps, as the paper allows.


def loscar(period: int = 16, density: float = 0.1, delay: int = 4, seed: int = 0):
    sparse = syncalgos.sparta(density=density, period=period, seed=seed)
    return delayed(sparse, delay, arrival="add")


# AdaComm. Source: Wang and Joshi, "Adaptive communication strategies to achieve the
# best error-runtime trade-off in local-update SGD", MLSys 2019.
#
#     τ ← ⌈√(F / F₀) τ₀⌉    the period τ follows the loss F, of which F₀ is the first
#
# All workers hold the same τ, so their votes are alike: an all-reduce of 4 bytes a
# step. The paper updates τ at intervals of time, shrinks it where the formula would
# not, and multiplies F / F₀ by η₀ / η once the learning rate η has fallen.
# PaddlePaddle's code has τ₀ inside the square root, and limits τ to 16.


class Rounds(NamedTuple):
    first_loss: jax.Array
    last_sync: jax.Array
    period: jax.Array


def adacomm(period: int = 16) -> Strategy:
    def init(params):  # the first sync, after step 0, measures F₀
        return Rounds(jnp.float32(0), jnp.int32(-1), jnp.int32(1))

    def is_due(replica, rounds, step):
        return step - rounds.last_sync >= rounds.period

    def sync(replica, rounds, step):
        loss = jnp.float32(collectives.mean(replica.loss))
        first_loss = jnp.where(step == 0, loss, rounds.first_loss)
        length = jnp.int32(jnp.ceil(jnp.sqrt(loss / first_loss) * period))
        averaged = replica._replace(params=collectives.mean(replica.params))
        return averaged, Rounds(first_loss, jnp.int32(step), length)

    return decided(Strategy(init, sync=sync, sees_loss=True), is_due)


# SAPS-PSGD, later GossipFL. Source: Tang, Shi and Chu, "Communication-efficient
# decentralized learning with sparsification and adaptive peer selection", ICDCS 2020.
#
#     θᵢ[M] ← (θᵢ[M] + θⱼ[M]) / 2    after every local step, for pairs i, j
#
# matchings[k][i] is the peer of worker i in matching k; they take turns, and together
# connect all workers. To use fast links more often, list their matchings more than
# once. In the paper, each entry is in M with probability `density`, and a coordinator
# draws the matching of each step from the links that are fast enough.


def saps_psgd(matchings, density: float = 0.1, seed: int = 0) -> Strategy:
    def sync(replica, state, step):
        entries, unravel = ravel_pytree(replica.params)
        key = jax.random.fold_in(jax.random.key(seed), step)
        count = max(1, round(density * entries.size))
        chosen = jax.random.choice(key, entries.size, (count,), replace=False)
        turn = step % len(matchings)
        peer_entries = collectives.exchange(entries[chosen], matchings, turn)
        mixed = entries.at[chosen].set((entries[chosen] + peer_entries) / 2)
        return replica._replace(params=unravel(mixed)), state

    return Strategy(sync=sync)


# ACCO. Source: Nabli et al., "ACCO: accumulate while you communicate for
# communication-overlapped sharded LLM training", 2025; the order of updates is that of
# the authors' code.
#
#     θ ← D(θ, (mean(g̃) + mean(g)) / 2)    while the next g̃ is computed
#     θ̃ ← D(θ, mean(g̃))                    while the next g is computed
#
# D(θ, g) is the optimizer's step; its new state is kept in the first line alone. The
# strategy takes these steps itself; they replace the trainer's. Nothing has arrived in
# the first step. The paper also shards the optimizer's state over the workers. Its
# baseline, delayed parameter updates, is `delayed(sync_sgd(), 1)`.


def acco(optimizer: optax.GradientTransformation) -> Strategy:
    def init(params):
        none = jax.tree.map(jnp.zeros_like, params)
        return [none, none, none], (params, optimizer.init(params))

    def reduce(grads, replica, state, step):
        (_, *latest_means), model = state
        return grads, ([*latest_means, collectives.mean(grads)], model)

    def sync(replica, state, step):
        means, model = state
        is_whole = step % 2 == 0  # else half of the gradients, for an estimate
        grads = jax.tree.map(
            lambda a, b: jnp.where(is_whole, (a + b) / 2, b), means[0], means[1]
        )
        updates, opt_state = optimizer.update(grads, model[1], model[0])
        new_model = optax.apply_updates(model[0], updates), opt_state
        kept_model = jax.tree.map(
            lambda x, y: jnp.where(is_whole, x, y), new_model, model
        )
        return replica._replace(params=new_model[0]), (means, kept_model)

    return Strategy(init, reduce, sync, late=1)


# CoCoDC. Source: Zhu et al., "Cross-region model training with
# communication-computation overlapping and delay compensation", 2025.
#
#     θ ← anchor + (θ - y)    `delay` steps after the fragment y was sent
#
# As in Streaming DiLoCo, but local steps taken while a fragment is under way are kept.
# The paper also corrects them by a Taylor expansion, and chooses the next fragment by
# how fast each one changes; neither can be composed.


def cocodc(period: int = 16, fragments: int = 4, delay: int = 2):
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)

    def fragment(number):
        def is_own(params):
            leaves, form = jax.tree.flatten(params)
            return form.unflatten(i % fragments == number for i in range(len(leaves)))

        start = number * period // fragments
        synced = every(syncalgos.outer_step(outer), period, offset=start)
        return masked(delayed(synced, delay, arrival="add"), is_own)

    return chain(*map(fragment, range(fragments)))


def main() -> None:
    model = np.ones(1000, np.float32)
    for name, strategy in (
        ("averaging", syncalgos.model_averaging()),
        ("loscar", loscar()),
    ):
        sent = syncalgos.communication(strategy, model, workers=8, steps=32)
        print(f"{name}: {sent.bytes_per_worker:.0f} bytes in {sent.syncs} syncs")

    def loss(w, x):
        return ((w - x) ** 2).mean()

    batches = np.random.default_rng(0).normal(3.0, 0.3, (64, 64)).astype(np.float32)
    trainer = syncalgos.DataParallel(loss, optax.sgd(0.02), adacomm(), workers=8)
    state, metrics = trainer.run(trainer.init(np.float32(0)), batches)
    print("adacomm: averages after steps", *np.flatnonzero(metrics["decided"]) + 1)

    strategy = saps_psgd([[1, 0, 3, 2], [2, 3, 0, 1], [3, 2, 1, 0]])
    sent = syncalgos.communication(strategy, model, workers=4, steps=3)
    print(f"saps_psgd: {sent.bytes_per_worker:.0f} bytes in 3 steps")

    batches = np.random.default_rng(0).normal(3.0, 1.0, (320, 64)).astype(np.float32)
    optimizer = optax.adam(0.1)
    trainer = syncalgos.DataParallel(loss, optimizer, acco(optimizer), workers=8)
    state, _ = trainer.run(trainer.init(np.float32(0)), batches)
    print(f"acco: {trainer.center(state).params:.1f}")

    layers = [np.ones(1000, np.float32) for _ in range(8)]
    sent = syncalgos.communication(cocodc(), layers, workers=8, steps=32)
    steps = np.flatnonzero(np.diff(sent.per_step, prepend=0)) + 1
    print("cocodc: sends after steps", *steps)


if __name__ == "__main__":
    main()
