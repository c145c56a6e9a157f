"""Makes the missing runs of a study by jobs: a Dask task for each share of runs.

A Dask worker makes its runs itself, and needs to see the study's folder. Dask tries a
share again elsewhere if the worker is lost; its finished runs are then skipped.
"""

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from experiments.cli.errors import BadRequest
from experiments.launch import inspection
from experiments.study.config import StudyConfig
from experiments.study.grid import Loader, is_done
from experiments.study.running.cluster import cluster, dashboard
from experiments.study.running.maker import Maker, Stopped
from experiments.study.running.messages import Made, Refused
from experiments.study.running.plan import Plan, Share
from experiments.study.running.progress import StudyProgress
from experiments.training.config import parse
from experiments.training.devices import cores, environment
from experiments.training.versions import versions

if TYPE_CHECKING:
    from distributed import Future

TICK = 0.05  # seconds between two looks
SEEING = 60.0  # seconds until files from another machine must be visible
SETTINGS = "jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl"


class Order(NamedTuple):
    """The order to make a share.

    Attributes:
        topic: of the events that tell the command of each run.
        facts: what the worker must have in common with the command.
        factories: names of the task and of the algorithms.
        settings: of jax.
        runs: name, flags and folder of each run.
    """

    topic: str
    facts: Mapping[str, str]
    factories: Sequence[str]
    settings: Mapping[str, Any]
    runs: Sequence[tuple[str, Sequence[str], str]] = ()


class Unfit(NamedTuple):
    """A worker that cannot make the study's runs, and why."""

    address: str
    why: str


def job_environment(devices: int | None) -> dict[str, str]:
    """Returns environment variables of the jobs' processes: devices and threads.

    They match this process, so that jobs give the same bits wherever they run.
    """
    if devices is not None:
        return environment(devices, devices)
    if jax.default_backend() != "cpu":
        return {}
    threads = os.environ.get("NPROC", str(cores()))
    return environment(jax.local_device_count(), int(threads))


@cache  # a worker keeps the code that it has imported, whatever is edited afterwards
def facts(factories: tuple[str, ...]) -> dict[str, str]:
    """Returns the versions, the code and the devices of this process."""
    own = {name.partition(":")[0] for name in factories if ":" in name}
    code = {x: inspection.digest(x) or "" for x in (*inspection.PACKAGES, *sorted(own))}
    devices = f"{jax.local_device_count()} {jax.default_backend()}"
    return {**versions(), **code, "devices": devices}


@cache
def _loader() -> Loader:
    """Returns the loader of a worker, which keeps the data of its studies."""
    return Loader()


def make_share(order: Order) -> list[Made | Refused] | Unfit:
    """Makes the runs of a share on a Dask worker."""
    from distributed import get_worker

    worker = get_worker()
    key, here = worker.get_current_task(), facts(tuple(order.factories))
    for name, meant in order.facts.items():
        if here.get(name) != meant:
            why = f"its {name} is {here.get(name)}, but this command has {meant}"
            return Unfit(worker.address, f"{why}: restart it once they agree")
    for name, value in order.settings.items():
        jax.config.update(name, value)

    def is_unwanted() -> int:
        task = worker.state.tasks.get(key)
        return int(task is None or task.state != "executing")

    jax.clear_caches()
    maker, found = Maker(_loader()), []
    for name, argv, folder in order.runs:
        outcome = Made("complete already")
        if not is_done(Path(folder)):
            args = parse(argv), Path(folder), lambda news: None, is_unwanted
            outcome = maker.make(*args)
        worker.log_event(order.topic, f"{name}: {outcome[0]}")
        found.append(outcome)
    return found


def make(
    config: StudyConfig,
    plan: Plan,
    bar: StudyProgress,
    asked_to_stop: Callable[[], int],
) -> None:
    """Makes all runs of a plan on a cluster.

    Args:
        config: the config of the study.
        plan: the missing runs.
        bar: the display of the runs.
        asked_to_stop: function that is polled all the time.

    Raises:
        BadRequest: the workers of this command's own cluster are unfit.
        Stopped: the user asked to stop. Runs in progress are discarded.
        OSError: a file cannot be written, or the scheduler is gone. Completed runs are
            kept.
        Unreachable: no scheduler answers.
    """
    environ = job_environment(config.devices_per_job)
    order = Order(
        topic=secrets.token_hex(8),
        facts=facts(config.factories),
        factories=config.factories,
        settings={name: getattr(jax.config, name) for name in SETTINGS},
    )
    if config.devices_per_job is not None or environ:
        devices = f"{environ['JAX_NUM_CPU_DEVICES']} cpu"
        order = order._replace(facts={**order.facts, "devices": devices})
    jobs, barred = min(config.jobs, plan.total - plan.done), set[str]()
    with cluster(config.scheduler, jobs, environ) as client:
        bar.say(f"dashboard: {dashboard(client)}")
        client.subscribe_topic(order.topic, lambda event: bar.say(event[1]))
        pending: dict[Future, Share] = {}
        while not plan.is_over:
            if asked_to_stop():
                raise Stopped
            slots = {x: n for x, n in client.nthreads().items() if x not in barred}
            count = sum(slots.values())
            while len(pending) < count and (share := plan.take(count)) is not None:
                runs = [(x.name, x.argv, str(x.folder.absolute())) for x in share.runs]
                given = {"workers": [*slots], "pure": False}
                own = order._replace(runs=runs)
                pending[client.submit(make_share, own, **given)] = share
            time.sleep(TICK)
            for future in [x for x in pending if x.done()]:
                found, share = _result(future), pending.pop(future)
                if isinstance(found, Unfit):
                    if config.scheduler is None:  # no other worker will come
                        raise BadRequest(found.why)
                    bar.say(f"the Dask worker {found.address} is refused: {found.why}")
                    barred.add(found.address)
                    found = []
                _settle(plan, bar, share, found)


def _result(future: "Future") -> list[Made | Refused] | Unfit | str:
    """Returns what a task returned, or why there is nothing."""
    try:
        return future.result()
    except OSError:  # a full disk would stop all others, too
        raise
    except Exception as error:  # Dask's own, after it has tried several workers
        return f"given up: {type(error).__name__}: {error}".partition("\n")[0]


def _settle(
    plan: Plan, bar: StudyProgress, share: Share, found: Sequence[Any] | str
) -> None:
    """Counts the runs of a share, and gives back those that were not made."""
    if isinstance(found, str):  # the first that is not complete is to blame
        done = [Made("") for run in share.runs if is_done(run.folder)]
        found = [*done, Refused(found)]
    for outcome in found:
        if isinstance(outcome, Made) and not _is_seen(share.runs[0].folder):
            outcome = Refused("its files do not appear in the study's folder")
        bar.count(outcome)
        plan.ended(share, outcome)
    plan.give_back(share)


def _is_seen(folder: Path) -> bool:
    """Waits for the files of a run from another machine; returns whether they came."""
    deadline = time.monotonic() + SEEING
    while not is_done(folder) and time.monotonic() < deadline:
        # NFS remembers for a while that a file was missing; listing refreshes it.
        os.listdir(folder.parent)
        time.sleep(TICK)
    return is_done(folder)
