"""Syncs of the quadratics' workers in NumPy: the one oracle of all combinators."""

import numpy as np

from support.problems.quadratics import SIZE, START, STEPS, ByHand

ALL = np.ones(SIZE, bool)
BODY = np.arange(SIZE) < 16  # the entries of the body's leaves, bias and kernel


class Mean:
    """Model averaging: what it makes of the mean of the models is the mean."""

    center = None  # the mean of the replicas, at any time

    def __init__(self, start):
        pass

    def __call__(self, mean):
        return mean


class Filtered(Mean):
    """BMUF of block momentum 0.8 and block rate 0.7."""

    def __init__(self, start):
        self.center = start
        self.velocity = np.zeros(SIZE)

    def __call__(self, mean):
        self.velocity = 0.8 * self.velocity + 0.7 * (mean - self.center)
        self.center = self.center + self.velocity
        return self.center


class NesterovOracle(Filtered):
    """DiLoCo of outer momentum 0.8 and outer rate 0.7."""

    def __call__(self, mean):
        outer_grad = self.center - mean
        self.velocity = 0.8 * self.velocity + outer_grad
        self.center = self.center - 0.7 * (outer_grad + 0.8 * self.velocity)
        return self.center


def ends_every(period, offset=0):
    """step -> whether it ends a round of so many steps."""
    return lambda step: (step + 1 - offset) % period == 0


ROUNDS_OF_4 = ends_every(4)


def weigh_alike(step):
    """All workers' weights are 1."""
    return np.ones(4)


def keep_momenta(momenta, shares):
    """The momenta as they are."""
    return momenta


def reset_momenta(momenta, shares):
    """A reset of the momenta."""
    return 0 * momenta


def average_momenta(momenta, shares):
    """A mean of the momenta."""
    return np.broadcast_to(shares @ momenta, momenta.shape)


class SyncedWorkers:
    """Four workers that train and sync; each combinator has its hook.

    Args:
        ends: step -> whether a sync is sent.
        block: start -> a function, mean of the models -> the next start, and `center`.
        begins: the step from whose start the block begins.
        mask: the entries that take part, (SIZE,).
        weights: step -> the workers' weights; 0 skips.
        stale: whether those who skip keep all that they have, and hand in all later.
        delay: steps from sending to arrival.
        alpha: the share of the local value at an arrival.
        add: whether a result's difference is added, and does not replace.
        quotas: the local steps of each worker in a round, or one number.
        momentum: of the inner optimizer.
        moments: (momenta, shares of the workers) -> the momenta behind a sync.
        behind: whether that happens where results arrive, else where they are sent.
        combine: (grads, step) -> those that workers step along.
        decay: of the moving average that is the center, if there is one.
        steps: local steps.

    Attributes:
        replicas: all models after each step, (steps, workers, SIZE).
        centers: their centers, (steps, SIZE).
    """

    def __init__(
        self,
        ends=ROUNDS_OF_4,
        block=Mean,
        *,
        begins=0,
        mask=ALL,
        weights=weigh_alike,
        stale=False,
        delay=0,
        alpha=0.0,
        add=False,
        quotas=np.inf,
        momentum=0.0,
        moments=keep_momenta,
        behind=False,
        combine=lambda grads, step: grads,
        decay=None,
        steps=STEPS,
    ):
        self.ends = ends
        self.block = block(START)
        self.mask = mask
        self.weights = weights
        self.stale = stale
        self.delay = delay
        self.alpha = alpha
        self.add = add
        self.moments = moments
        self.behind = behind
        self.start = np.tile(START, (4, 1))
        self.common = START
        self.center = self.block.center
        self.on_the_way = {}
        by_hand = ByHand(steps=steps, momentum=momentum, combine=combine)
        old_theta = self.start.copy()
        steps_done = 0
        average = START
        self.centers = []
        for step, theta, momenta in by_hand:
            rests = np.broadcast_to(steps_done >= np.asarray(quotas), 4)
            theta[rests] = old_theta[rests]
            # What arrives does so before the next is sent.
            for act in self._acts(step):
                act(step, theta, momenta)
            if step < begins:
                self.block = block(theta.mean(0))
                self.start = theta.copy()
                self.common = theta.mean(0)
                self.center = self.block.center
            old_theta = theta.copy()
            steps_done = 0 if self._lands(step) else steps_done + 1
            center = theta.mean(0)
            if self.center is not None:
                center = np.where(mask, self.center, center)
            if decay is not None:
                mean = self._round_shares(step, np.asarray(quotas)) @ theta
                center = average = average + (1 - decay) * (mean - average)
            self.centers.append(center)
        self.replicas = by_hand.replicas
        self.centers = np.array(self.centers)

    def _round_shares(self, step, quotas):
        """The workers' shares in the round of a step."""
        shares = np.ones(4)
        end_step = next((s for s in range(step, 99) if self.ends(s)), None)
        of_round = weigh_alike(step) if end_step is None else self.weights(end_step)
        for weights in (quotas > 0, of_round):
            shares = shares * weights if (shares * weights).any() else shares
        return shares / shares.sum()

    def _lands(self, step):
        return step >= self.delay and self.ends(step - self.delay)

    def _acts(self, step):
        arrives = [self._receive] if self._lands(step) else []
        sends = [self._send] if self.ends(step) else []
        return arrives + sends if self.delay else sends + arrives

    def _send(self, step, theta, momenta):
        weights = self.weights(step)
        result = theta.copy()
        if weights.any():
            shares = weights / weights.sum()
            moved = shares @ (theta - self.start)
            self.common = self.block(self.common + moved)
            reached = self._reached(weights)
            result[reached] = self.start[reached] = self.common
            if not self.behind:
                momenta[reached] = self.moments(momenta, shares)[reached]
        self.on_the_way[step] = result, theta.copy(), self.block.center

    def _receive(self, step, theta, momenta):
        result, sent_theta, self.center = self.on_the_way.pop(step - self.delay)
        reached = self._reached(self.weights(step - self.delay))
        alpha = self.alpha
        if self.add:
            arrived = theta + (1 - alpha) * (result - sent_theta)
        else:
            arrived = (1 - alpha) * result + alpha * theta
        theta[np.ix_(reached, self.mask)] = arrived[np.ix_(reached, self.mask)]
        if self.behind:
            momenta[reached] = self.moments(momenta, np.ones(4) / 4)[reached]

    def _reached(self, weights):
        """The workers that a sync's result reaches."""
        return weights > 0 if self.stale else np.ones(4, bool)


def reduced(weights=weigh_alike, mask=ALL, delay=0, ends=lambda step: True):
    """Makes a `combine`: gradients are averaged, and used so many steps later."""
    sent_grads = []

    def combine(grads, step):
        total = weights(step).sum()
        mean = weights(step) @ grads / total if total else np.zeros(SIZE)
        sent_grads.append(mean if ends(step) else grads)
        late = sent_grads[step - delay] if step >= delay else np.zeros(SIZE)
        return np.where(mask, late, grads)

    return combine
