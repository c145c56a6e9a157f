"""Compares the model of time with published figures.

`python -m benchmarks.network.published` compares the modelled times of
`experiments.aim` and `experiments.compare` (the ledger's bytes over a link by the α-β
model) with published figures:

- the bandwidth between two workers at which they compute for 50 to 99 % of the time
  (Douillard et al., "Streaming DiLoCo with overlapping communication", 2025, table 4);
- the speed-up of synchronous SGD on 256 GPUs over 8 (Goyal et al., "Accurate, large
  minibatch SGD", 2017), and on 8 and 64 GPUs over one (Caffe2's announcement, 2017);
- that of BMUF on 4 to 64 GPUs (CNTK's documentation, "Multiple GPUs and machines").

It trains nothing. In the last column, two thirds of a step (its backward pass) overlap
with the step's sends, as the first paper assumes; in syncalgos a local step ends before
its sync begins.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import syncalgos
from benchmarks.measure import print_record, table_of_records
from syncalgos import Strategy
from syncalgos.network import Network, Sends, cost, parse, sends, wall_clock

SHARES = (0.5, 0.8, 0.9, 0.95, 0.99)
BACKWARD = 2 / 3  # of a local step
MAX_BANDWIDTH = 1e15  # bytes per second, more than any link


class PublishedModel(NamedTuple):
    """A model of the table: params, layers, and seconds of a local step."""

    params: float
    layers: int
    seconds: float


class PublishedMethod(NamedTuple):
    """A row of the table: (period, fragments) -> the strategy, and its delay."""

    make_strategy: Callable[[int, int], Strategy]
    delay: int = 0


# Params are bfloat16. Anchors are float32, so pseudo-gradients are, too, unless a
# reducer rounds them.
METHODS = {
    "data-parallel": PublishedMethod(lambda *_: syncalgos.sync_sgd()),
    "DiLoCo": PublishedMethod(
        lambda period, _: syncalgos.diloco(period, reduce="bf16")
    ),
    "streaming": PublishedMethod(
        lambda period, parts: syncalgos.streaming_diloco(
            period, fragments=parts, reduce="bf16"
        )
    ),
    "streaming, a step late": PublishedMethod(
        lambda period, parts: syncalgos.streaming_diloco(
            period, fragments=parts, delay=1, reduce="bf16"
        ),
        1,
    ),
    "streaming, a step late, 4 bits": PublishedMethod(
        lambda period, parts: syncalgos.streaming_diloco(
            period, fragments=parts, delay=1, reduce="int4"
        ),
        1,
    ),
}
MODELS = {
    "1B": PublishedModel(1e9, 24, 0.1),
    "10B": PublishedModel(1e10, 48, 0.8),
    "100B": PublishedModel(1e11, 108, 4.9),
}
PUBLISHED = {  # Gbit/s at SHARES, in the order of METHODS
    "1B": (
        (86.8, 152.6, 184.2, 222.3, 569.0),
        (1.4, 6.2, 13.3, 23.3, 86.8),
        (1.4, 5.2, 9.1, 16.0, 28.1),
        (1.4, 4.3, 6.2, 9.1, 11.0),
        (0.4, 0.9, 1.7, 2.0, 3.0),
    ),
    "10B": (
        (104.8, 222.3, 222.3, 268.3, 471.5),
        (1.7, 7.5, 16.0, 33.9, 104.8),
        (1.7, 5.2, 9.1, 13.3, 19.3),
        (1.7, 3.6, 5.2, 6.2, 7.5),
        (0.4, 0.9, 1.4, 1.4, 1.7),
    ),
    "100B": (
        (184.2, 323.8, 390.7, 390.7, 471.5),
        (3.0, 11.0, 23.3, 49.4, 184.2),
        (2.4, 6.2, 9.1, 11.0, 19.3),
        (1.7, 3.6, 4.3, 5.2, 5.2),
        (0.5, 0.9, 1.1, 1.1, 1.4),
    ),
}


# ResNet-50 has 25.56 M params. 90 epochs of ImageNet in an hour, by batches of 8192,
# are 0.256 s a step on 256 GPUs; at 0.9 of the speed of 8 GPUs, 0.230 s there. Hosts of
# 8 P100s have 50 Gbit/s of Ethernet and NVLink of 20 GB/s a link.
RESNET = [jax.ShapeDtypeStruct((25_560_000,), jnp.float32)]
STEP_SECONDS = 0.230
ETHERNET = parse("50Gbit/s, 24us")
NVLINK = parse("20GB/s, 3.4us")
# LSTMs for 2,600 hours of speech: average and peak speed-up by GPUs.
BMUF = {
    4: (3.69, 4.13),
    8: (6.92, 8.13),
    16: (13.75, 14.11),
    32: (25.46, 27.27),
    64: (43.65, 54.0),
}


class SpeedUp(NamedTuple):
    """A published speed-up of synchronous SGD.

    Attributes:
        figure: what was measured.
        published: its value.
        workers: number of GPUs.
        link: the link between them.
        ideal: the value if nothing had to be sent.
    """

    figure: str
    published: float
    workers: int
    link: Network
    ideal: float


SYNCHRONOUS = (
    SpeedUp("Goyal, 256 GPUs: efficiency over 8", 0.9, 256, ETHERNET, 1),
    SpeedUp("Caffe2, 8 GPUs: speed-up over 1", 7.0, 8, NVLINK, 8),
    SpeedUp("Caffe2, 64 GPUs: speed-up over 1", 57.0, 64, ETHERNET, 64),
)
COLUMNS = {
    "published": "published",
    "modelled": "modelled",
    "beside the backward pass": "hidden",
}


def count_sends(
    strategy: Strategy, params: Sequence[jax.ShapeDtypeStruct], workers: int, steps: int
) -> Sends:
    """Returns the sends of a worker in `steps` local steps, by the ledger."""
    return sends(
        syncalgos.communication(strategy, [*params], workers=workers, steps=steps)
    )


def compute_share(
    run_sends: Sends,
    workers: int,
    link: Network,
    seconds: float,
    delay: int = 0,
    hidden: float = 0.0,
) -> float:
    """Returns the share of the time in which workers compute, by the model.

    Args:
        run_sends: the sends of each worker.
        workers: number of workers.
        link: the link between any two workers.
        seconds: seconds of a local step.
        delay: local steps that a message may take.
        hidden: the fraction of a step that overlaps with its own sends.
    """
    costs = []
    for kind in run_sends.kinds:
        send_seconds = cost(kind, link, workers)
        costs.append(max(0.0, send_seconds - hidden * seconds))
    step_costs = [costs[kind] for kind in run_sends.steps]
    step_ends = wall_clock(step_costs, seconds, delay)
    return len(run_sends.steps) * seconds / float(step_ends[-1])


def find_least_bandwidth(is_enough: Callable[[float], bool]) -> float:
    """Returns the smallest sufficient bandwidth in bytes per second, to a millionth."""
    low = 1.0
    high = MAX_BANDWIDTH
    while high / low > 1 + 1e-6:
        middle = math.sqrt(low * high)
        if is_enough(middle):
            high = middle
        else:
            low = middle
    return high


@cache
def count_sends_of_two(model: PublishedModel, method: PublishedMethod) -> Sends:
    """Returns the sends of each of two workers in four rounds."""
    layer = jax.ShapeDtypeStruct((int(model.params) // model.layers,), jnp.bfloat16)
    fragments = model.layers // 3  # of three layers, as in the paper
    period = math.ceil(100 / fragments) * fragments  # 100 there; a multiple here
    strategy = method.make_strategy(period, fragments)
    return count_sends(strategy, [layer] * model.layers, workers=2, steps=4 * period)


def bandwidths(
    model: PublishedModel, method: PublishedMethod, hidden: float = 0.0
) -> list[float]:
    """Returns the Gbit/s at which two workers compute for each of SHARES.

    Args:
        model, method: a model and a method of the table.
        hidden: as in `compute_share`.
    """
    run_sends = count_sends_of_two(model, method)

    def share_with(bandwidth: float) -> float:
        link = Network("", bandwidth, 0.0)
        return compute_share(run_sends, 2, link, model.seconds, method.delay, hidden)

    gigabits = []
    for share in SHARES:
        least = find_least_bandwidth(lambda x, share=share: share_with(x) >= share)
        gigabits.append(8e-9 * least)
    return gigabits


def model_bmuf() -> dict[int, float]:
    """Returns BMUF's speed-up by GPUs, with a link that is fitted to 4 of them."""
    params = [jax.ShapeDtypeStruct((1_000_000,), jnp.float32)]
    period = 10

    def speed_up(workers: int, bandwidth: float) -> float:
        run_sends = count_sends(syncalgos.bmuf(period), params, workers, period)
        link = Network("", bandwidth, 0.0)
        return workers * compute_share(run_sends, workers, link, seconds=1.0)

    average, _peak = BMUF[4]
    fitted = find_least_bandwidth(lambda bandwidth: speed_up(4, bandwidth) >= average)
    return {workers: speed_up(workers, fitted) for workers in BMUF}


def model_rows() -> Iterator[dict[str, Any]]:
    """Yields published figures with the modelled ones."""
    shares = ", ".join(f"{share:.0%}" for share in SHARES)
    for name, model in MODELS.items():
        for method_name, published in zip(METHODS, PUBLISHED[name], strict=True):
            method = METHODS[method_name]
            yield {
                "figure": f"{name}, {method_name}: Gbit/s for {shares}",
                "published": published,
                "modelled": bandwidths(model, method),
                "hidden": bandwidths(model, method, hidden=BACKWARD),
            }
    for speed_up in SYNCHRONOUS:
        workers = speed_up.workers
        step_sends = count_sends(syncalgos.sync_sgd(), RESNET, workers, steps=1)
        share = partial(compute_share, step_sends, workers, speed_up.link, STEP_SECONDS)
        yield {
            "figure": f"synchronous SGD, {speed_up.figure}",
            "published": [speed_up.published],
            "modelled": [speed_up.ideal * share()],
            "hidden": [speed_up.ideal * share(hidden=BACKWARD)],
        }
    for workers, modelled in model_bmuf().items():
        yield {
            "figure": f"BMUF, CNTK, {workers} GPUs: speed-up, average and peak",
            "published": BMUF[workers],
            "modelled": [modelled],
            "hidden": [],
        }


def main() -> None:
    """Prints the records and their table."""
    about = "Compare the model of time with published figures."
    argparse.ArgumentParser(description=about).parse_args()
    records = [print_record({"benchmark": "published", **row}) for row in model_rows()]
    columns = {head: partial(_format_field, field) for head, field in COLUMNS.items()}
    print(table_of_records({"figure": "figure", **columns}, records))


def _format_field(field: str, record: Mapping[str, Any]) -> str:
    return ", ".join(f"{x:.3g}" for x in record[field]) or "–"


if __name__ == "__main__":
    main()
