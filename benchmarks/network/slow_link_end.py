"""One of the two processes of `benchmarks.slow_link`, which starts them."""

import math
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.experimental import multihost_utils

import syncalgos
from benchmarks.measure import report
from benchmarks.network import link
from experiments.study.network import Network, modelled_seconds
from experiments.training.measurements.sends import sends
from models import mlp

SIZES = (784, 640, 640, 320, 10)  # 1,120,970 float32 params, 4.48 MB in 8 leaves
BATCH, LR, PERIOD = 8, 0.01, 16
DISPATCH = 4  # local steps, of algorithms that send at each
SECONDS = 5.0  # of a timed stretch, at least
HOPS = 100  # all-reduces by which a hop is timed

STRATEGIES = {
    "sync_sgd": syncalgos.sync_sgd(),
    "bf16": syncalgos.sync_sgd(reduce="bf16"),
    "int8": syncalgos.sync_sgd(reduce="int8"),
    "topk_sgd": syncalgos.topk_sgd(),
    "powersgd": syncalgos.powersgd(),
    "model_averaging": syncalgos.model_averaging(PERIOD),
    "bmuf": syncalgos.bmuf(PERIOD),
    "diloco": syncalgos.diloco(PERIOD),
    "streaming_diloco": syncalgos.streaming_diloco(PERIOD),
}

# Data messages of a call between two processes. With each go three preambles: ready to
# send, ready to receive, and its own (gloo/transport/tcp/pair.h).
MESSAGES = {"all_reduce": 4, "all_gather": 2, "all_to_all": 1, "permute": 1}
PREAMBLES = 3 * 48


def loss(params, batch):
    logits = mlp.apply(params, batch["x"])
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]))


class Training:
    """An algorithm by so many workers, in rounds of one dispatch.

    Attributes:
        trainer: the engine.
        length: local steps of a round.
        state: of the trainer.
    """

    def __init__(self, algo: str, workers: int, devices: Sequence[Any]):
        self.trainer = syncalgos.DataParallel(
            loss,
            optax.sgd(LR),
            STRATEGIES[algo],
            workers=workers,
            placement=syncalgos.Placement(devices=devices),
        )
        self.state = self.trainer.init(mlp.init(jax.random.key(0), SIZES))
        sent = self.trainer.communication(self.state, PERIOD, workers=2)
        self.length = DISPATCH if sent.syncs == PERIOD else PERIOD
        rng = np.random.default_rng(jax.process_index())
        shape = self.length, BATCH
        self._batches = {
            "x": rng.normal(size=(*shape, SIZES[0])).astype(np.float32),
            "y": rng.integers(0, SIZES[-1], shape, np.int32),
        }
        self.train(1)

    def train(self, rounds: int) -> float:
        """Trains so many rounds; returns the seconds of a local step."""
        start = time.perf_counter()
        for _ in range(rounds):
            self.state, metrics = self.trainer.run(self.state, self._batches)
            if not np.isfinite(metrics["loss"]).all():
                raise ValueError("the loss is not finite")
        return (time.perf_counter() - start) / rounds / self.length


def hop() -> float:
    """Returns the least seconds of a hop of gloo's all-reduce of one number."""

    def reduce(x, _):
        return lax.pmean(x, "ends"), None

    program = jax.pmap(
        lambda x: lax.scan(reduce, x, None, length=HOPS)[0], axis_name="ends"
    )
    times = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(program(np.ones(1)))
        times.append(time.perf_counter() - start)
    return min(times) / HOPS / 2


def measured(
    rate: float, both: Training, alone: Training, networks: dict[str, Network]
) -> dict[str, Any]:
    """Measures one timed stretch, beside its prediction.

    Args:
        rate: of the link, in Mbit/s.
        both: of two workers, one at each end.
        alone: the same algorithm by one worker, which sends nothing.
        networks: by name, for the model.
    """
    computation = alone.train(2 * PERIOD // alone.length)
    steps = both.length
    counted = both.trainer.communication(both.state, steps)
    modelled = {}
    for name, network in networks.items():
        ended = modelled_seconds(
            sends(counted), network, 2, computation, fused="fused" in name
        )
        modelled[name] = ended[-1] / steps
    rounds = math.ceil(SECONDS / steps / modelled["nominal"])
    rounds = int(multihost_utils.broadcast_one_to_all(np.int32(rounds)))
    before = link.sent()
    seconds = both.train(rounds)
    after = link.sent()
    size = counted.bytes_per_worker
    messages = sum(
        MESSAGES[name] * part.calls for name, part in counted.by_collective.items()
    )
    interface, payload, wire = (
        (y - x) / rounds / size for x, y in zip(before, after, strict=True)
    )
    return {
        "steps": rounds * steps,
        "seconds_per_step": seconds,
        "steps_per_second": 1 / seconds,
        "computation_seconds": computation,
        "modelled_seconds": modelled,
        "bytes_per_step": size / steps,
        "calls_per_step": counted.calls / steps,
        "share_of_wire": size / steps * 8 / seconds / (rate * 1e6),
        "interface_ratio": interface,
        "wire_ratio": wire,
        "payload_ratio": payload - PREAMBLES * messages / size,
    }


def records(
    end: int, rate: float, repeats: int, algos: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Joins the other end and measures all algorithms, one after the other."""
    link.settle(end)
    probe = link.probe(end, round(rate * 1e6 / 16))
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    where = f"{link.ADDRESSES[0]}:{link.PORT + 1}"
    jax.distributed.initialize(
        where,
        2,
        end,
        initialization_timeout=link.PATIENCE,
        coordinator_bind_address=where,
    )
    found = {"rate": rate, **probe._asdict(), "hop": hop()}
    nominal = Network("nominal", rate * 1e6 / 8, probe.latency)
    networks = {
        "nominal": nominal,
        "nominal, fused": nominal,
        "probed": Network("probed", probe.goodput, found["hop"]),
    }
    trainings = {
        algo: (Training(algo, 2, jax.devices()), Training(algo, 1, jax.local_devices()))
        for algo in algos
    }
    for repeat in range(repeats):
        for algo, pair in trainings.items():
            row = measured(rate, *pair, networks)
            yield {
                "benchmark": "slow_link",
                "algorithm": algo,
                "repeat": repeat,
                **found,
                **row,
                "load": os.getloadavg()[0],
            }
    jax.distributed.shutdown()


def leave(*error: Any) -> None:
    """Prints an error and ends the process at once."""
    # At exit jax would wait for the other end, which waits for this one.
    traceback.print_exception(*error)
    os._exit(1)


def main() -> None:
    sys.excepthook = leave
    end, rate, repeats, *algos = sys.argv[1:]
    for record in records(int(end), float(rate), int(repeats), algos):
        report(record)


if __name__ == "__main__":
    main()
