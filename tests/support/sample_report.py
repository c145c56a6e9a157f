"""A made-up study, for the tests of what is shown of one."""

import math

import numpy as np

from experiments.study.results import (
    Basis,
    Comparison,
    Curve,
    Kind,
    Report,
    Row,
)
from experiments.study.runs import Tuning
from experiments.study.statistics import ACCURACY, Band, Difference, Spread
from syncalgos.network import Network

NETWORKS = [
    Network("10 GbE", 1.25e9, 50e-6),
    Network("two data centres (1 Gbit/s, 30 ms)", 1.25e8, 30e-3),
    Network("home DSL (10 Mbit/s, 20 ms)", 1.25e6, 20e-3),
]
STEPS = list(range(20, 401, 20))
SYNC_BYTES = 103_500.0
STEP_SECONDS = 2.1e-3

# label: final accuracy, its deviation, speed of learning, period, diverged of 5
ALGORITHMS = {
    "sync_sgd": (0.9724, 0.0021, 60, 1, 0),
    "bmuf --nesterov": (0.9748, 0.0019, 75, 16, 0),
    "diloco": (0.9691, 0.0034, 95, 32, 0),
    "slowmo --slow-momentum 0.95": (0.9552, 0.0121, 120, 16, 1),
}
CLAUSES = {
    "sync_sgd": "baseline",
    "bmuf --nesterov": "no difference seen [-0.1, 0.5]",
    "diloco": "worse by 0.3 points [0.1, 0.6]",
    "slowmo --slow-momentum 0.95": "worse by 1.7 points [0.6, 2.8], and 1 run diverged",
}
KINDS = {
    "sync_sgd": Kind.BASELINE,
    "bmuf --nesterov": Kind.NOT_SEEN,
    "diloco": Kind.WORSE,
    "slowmo --slow-momentum 0.95": Kind.WORSE,
}


def made_up(
    sweep: str = "", tuned: bool = True, labels: dict[str, str] | None = None
) -> Report:
    """Four algorithms of 5 seeds on three networks; slowmo diverged once.

    Args:
        sweep: the flag that is swept over 2, 4 and 8, "" for none.
        tuned: whether learning rate and period were tuned.
        labels: other names for the algorithms.
    """
    names = {name: (labels or {}).get(name, name) for name in ALGORITHMS}
    points = [f"{sweep}={x}" for x in (2, 4, 8)] if sweep else [""]
    row_keys = []
    for point in points:
        row_keys += [(name, label, point) for name, label in names.items()]
    baseline, *other_names = names
    return Report(
        title=f"{', '.join(names.values())} on digits",
        lead="No difference seen between sync_sgd and bmuf --nesterov",
        numbers=[
            ("97.48 %", "test accuracy of bmuf --nesterov"),
            ("1/16", "of what sync_sgd sends: bmuf --nesterov, 2.59 MB"),
        ],
        headline="Use bmuf --nesterov: it is as accurate as sync_sgd (97.5 % against "
        "97.2 %, no difference seen in 5 seeds) and sends 16 times less.",
        sentences=[
            f"{names[name]}: {CLAUSES[name]} (5 seeds, 95 % interval)."
            for name in other_names
        ],
        remarks=[
            "slowmo --slow-momentum 0.95: 1 of 5 runs diverged; its figures are those "
            "of the other 4.",
            "diloco's best lr 1 lies at the edge of what was tried: better may lie "
            "beyond.",
        ],
        measure=ACCURACY,
        terms="",
        baseline=names[baseline],
        target=0.95,
        rows=[row(*key) for key in row_keys],
        curves=[curve(*key) for key in row_keys],
        networks=NETWORKS,
        step_seconds=[STEP_SECONDS],
        step_seconds_origin="measured here",
        sweep=sweep,
        tuning=[scores(*key) for key in row_keys] if tuned else [],
        settings={"task": "digits", "workers": "8", "partition": "iid"},
        environment={"jax": "0.10.2", "machine": "x86_64, 2 cores"},
        command="python -m experiments.compare --task digits --algos 'sync_sgd,"
        "bmuf --nesterov,diloco' --tune lr=0.01:1.0:log:7 --out runs/x",
        paper={
            "preset": "block-momentum-long",
            "title": "SlowMo's table",
            "source": "Wang et al., SlowMo, ICLR 2020, table 1",
            "found": "Local SGD 91.73 %, BMUF 93.20 %, all-reduce 92.66 % on CIFAR-10.",
            "differs": "digits instead of CIFAR-10, an MLP instead of ResNet-18.",
        },
    )


def seconds(network: Network, period: int) -> list[float]:
    """Modelled, at the evaluations, of a ring all-reduce at every sync."""
    sync = SYNC_BYTES / network.bandwidth + 14 * network.latency
    return [step * STEP_SECONDS + step // period * sync for step in STEPS]


def curve(name: str, label: str, point: str) -> Curve:
    """Figures that rise and fall as figures of a training do."""
    final, deviation, pace, period, _ = ALGORITHMS[name]
    random = np.random.default_rng([len(name), len(point), pace])
    steps = np.array(STEPS)
    learned = 1 - np.exp(-steps / pace)
    wiggle = random.normal(0, 0.002, len(steps))
    accuracy = 0.1 + (final - 0.1) * learned + wiggle
    loss = 0.08 + 2.2 * (1 - learned) + (0.98 - final) * 3 + wiggle
    divergence = (
        np.zeros(len(steps)) if period == 1 else 0.4 * np.exp(-steps / 300) + wiggle
    )
    bands = {
        "train_loss": band(loss * 0.8, 0.02),
        "test_loss": band(loss, 0.03),
        "test_accuracy": band(accuracy, deviation + 0.02 * (1 - learned)),
        "divergence": band(divergence, 0.02 * (period > 1)),
        "pseudo_gradient": band(0.5 * period**0.5 * np.exp(-steps / 200), 0.02),
    }
    if period > 1:
        cosine = 0.2 + 0.6 * np.exp(-steps / 150)
        cosine[:1] = math.nan  # not measured before the first sync
        bands["displacement_cosine"] = band(cosine, 0.05)
    return Curve(
        label,
        point,
        STEPS,
        bands,
        [step // period * SYNC_BYTES for step in STEPS],
        {network.name: seconds(network, period) for network in NETWORKS},
    )


def band(mean: np.ndarray, deviation: float | np.ndarray) -> Band:
    """Mean and mean ± deviation."""
    low = mean - deviation
    high = mean + deviation
    return Band(mean.tolist(), low.tolist(), high.tolist())


def row(name: str, label: str, point: str) -> Row:
    """A line of the table."""
    final, deviation, pace, period, diverged = ALGORITHMS[name]
    gain = final - 0.9724
    count = 5 - diverged
    difference = Difference(gain, gain - 0.003, gain + 0.003, 0.003, 5, False)
    reached = [
        i for i, s in enumerate(STEPS) if final * (1 - math.exp(-s / pace)) > 0.95
    ]
    times = {n.name: seconds(n, period) for n in NETWORKS}
    return Row(
        label=label,
        algo=name.split()[0],
        point=point,
        seeds=5,
        diverged=diverged,
        result=Spread(final, deviation, count),
        loss=Spread(0.08 + (0.98 - final) * 3, 0.011, count),
        comparison=Comparison(
            KINDS[name],
            basis=None if name == "sync_sgd" else Basis.INTERVAL,
            difference=None if name == "sync_sgd" else difference,
            clause=CLAUSES[name],
        ),
        lr=0.1,
        effective_lr=0.1 * (16 if "bmuf" in name else 1),
        steps=STEPS[-1],
        tuned={"lr": 0.1},
        bytes_per_worker=STEPS[-1] // period * SYNC_BYTES,
        syncs=STEPS[-1] // period,
        seconds={name: clock[-1] for name, clock in times.items()},
        to_target={
            name: clock[reached[0]] if reached else None
            for name, clock in times.items()
        },
        steps_to_target=STEPS[reached[0]] if reached else None,
        command=f"python -m experiments.run --task digits --algo {label} --lr 0.1",
    )


def scores(name: str, label: str, point: str) -> Tuning:
    """Seven learning rates, the largest of which diverged for slowmo."""
    values = [0.01, 0.0215, 0.0464, 0.1, 0.215, 0.464, 1.0]
    best = {"diloco": 6, "slowmo --slow-momentum 0.95": 2}.get(name, 3)
    means = [ALGORITHMS[name][0] - 0.012 * abs(i - best) ** 1.5 for i in range(7)]
    scores_of_rates = [*means[:6], None if name.startswith("slowmo") else means[6]]
    return Tuning(
        label, point, "lr", values, scores_of_rates, values[best], best in (0, 6)
    )
