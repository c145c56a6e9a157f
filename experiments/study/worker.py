"""Makes runs of a study on a Dask worker.

jax starts here as in the command, so it is imported only after its variables are set.
"""

import hashlib
import importlib
import os
import pickle
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, suppress
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.checkpoint import lock
from experiments.command.errors import BadRequest
from experiments.training.config import RunConfig
from experiments.training.machine import versions

if TYPE_CHECKING:
    from distributed import Worker

    from experiments.study.making import FinishedRun, Maker, News, Refused


PACKAGES = "syncalgos", "models", "experiments"

_started: dict[str, str] = {}  # the variables with which this worker has started jax
_alone = threading.Lock()  # jax's settings and memory are those of the whole process

# The command, as plain values that all of its tasks get:
# - folder: the study's folder
# - holder: the content of its lock file, which names this command
# - topic: the topic of events that tell the command of each step
# - directory: the command's working folder, for relative paths in flags
# - environ: variables with which jax must start: devices, threads, XLA flags
# - settings: settings of jax
# - factories: names of the task and of the algorithms
# - facts: what `facts` returns to the command
# - first: the config of one run, whose data all workers need
# - objects: the `Objects` of that run, pickled
Order = Mapping[str, Any]


def facts(factories: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Returns what decides the bits of this process's runs.

    Args:
        factories: names of the task and of the algorithms.
        environ: the variables with which jax has started.
    """
    import jax

    code = (*PACKAGES, *modules(factories))
    return {
        **versions(),
        **{f"code of {module}": _imported(module)[:12] for module in code},
        "devices": f"{jax.local_device_count()} {jax.default_backend()}",
        **environ,
    }


def check_worker(order: Order) -> None:
    """Checks that this Dask worker can make a study's runs, and starts its jax.

    Args:
        order: the command's order.

    Raises:
        BadRequest: it cannot; one line says why.
        Exception: it lacks a package, the user's own module or the task's data.
    """
    folder = order["folder"]
    try:
        with Path(folder, lock.NAME).open("r+") as file:
            is_this_study = file.read() == order["holder"]
    except OSError as error:
        raise BadRequest(
            f"{folder}: {error.strerror}: workers must see the study's folder, at this "
            "path"
        ) from None
    if not is_this_study:
        raise BadRequest(
            f"{folder}: another folder: workers must see the study's folder, at this "
            "path"
        )
    with _set_up(order):
        worker_facts = facts(order["factories"], _started)
        for name, value in order["facts"].items():
            worker_value = worker_facts.get(name)
            if worker_value != value:
                raise BadRequest(
                    f"{name}: {worker_value!r} there, {value!r} here: restart it once "
                    "they agree"
                )
        objects = pickle.loads(order["objects"])
        loader = _maker(order["topic"]).loader
        loader.plan(RunConfig(**order["first"]), objects=objects)


def make_run(
    order: Order, number: int, config: Mapping[str, Any], folder: str, objects: bytes
) -> "FinishedRun | Refused":
    """Executes a run on this Dask worker, which has passed `check`.

    Args:
        order: the command's order.
        number: the number of the run's cell.
        config: the fields of the run's config.
        folder: the folder of its files.
        objects: the `Objects` of the run, pickled.

    Raises:
        StopRequested: the command or the scheduler is gone, or this worker ends.
        OSError: a file cannot be written.
    """
    from distributed import get_worker

    worker = get_worker()
    key = worker.get_current_task()

    def report(news: "News") -> None:
        worker.log_event(order["topic"], (key, news))

    with _set_up(order):
        maker = _maker(order["topic"])
        is_unwanted = partial(_is_unwanted, worker, key)
        return maker.make(
            number,
            RunConfig(**config),
            Path(folder),
            report,
            is_unwanted,
            pickle.loads(objects),
        )


def _is_unwanted(worker: "Worker", key: Any) -> bool:
    """Whether this worker ends, or the command of a task is gone or has given it up."""
    # The scheduler then withdraws the task. A worker without a scheduler closes.
    task = worker.state.tasks.get(key)
    is_open = worker.status.name in ("running", "paused")
    return not is_open or task is None or task.state != "executing"


@contextmanager
def _set_up(order: Order) -> Iterator[None]:
    """Works alone, in the command's folder, and gives jax the command's settings.

    jax gets its devices unless it has started.
    """
    has_folder = Path(order["directory"]).is_dir()
    with _alone, chdir(order["directory"] if has_folder else "."):
        if not _started:
            _started.update(order["environ"])
            os.environ.update(order["environ"])
        import jax

        settings = dict(order["settings"])
        count = _started.get("JAX_NUM_CPU_DEVICES")
        if count:
            settings["jax_num_cpu_devices"] = int(count)
        for name, value in settings.items():
            with suppress(RuntimeError):  # it runs already: `facts` tells its devices
                jax.config.update(name, value)
        yield


@lru_cache(maxsize=1)
def _maker(topic: str) -> "Maker":
    """Returns the maker of a command's runs, which keeps their data and programs."""
    import jax

    from experiments.study.making import Maker

    jax.clear_caches()
    return Maker()


def of_runs(names: Iterable[str]) -> dict[str, str]:
    """Returns the versions of packages, and of the user's own modules.

    Args:
        names: names of algorithms and tasks; those with a colon are the user's own.
    """
    # Runs of an edited algorithm must not be mixed with earlier ones.
    return {**versions(), **{module: of_code(module) for module in modules(names)}}


def modules(names: Iterable[str]) -> list[str]:
    """Returns the user's own modules among the names of algorithms and tasks."""
    return sorted({name.partition(":")[0] for name in names if ":" in name})


def of_code(module: str) -> str:
    """Returns a digest of a module's code: of all files, if it is one of `PACKAGES`."""
    module_path = Path(importlib.import_module(module).__file__ or "")
    paths = [module_path]
    if module in PACKAGES:
        paths = sorted(module_path.parent.rglob("*.py"))
    # Lock files of text editors are broken links.
    contents = [path.read_bytes() for path in paths if path.is_file()]
    return hashlib.sha256(b"".join(contents)).hexdigest()


_imported = cache(of_code)  # a worker keeps what it has imported, whatever is edited
