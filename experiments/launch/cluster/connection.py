"""Connections to a Dask scheduler."""

import importlib.util
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict
from urllib.parse import urlsplit

from experiments.cli.errors import BadRequest
from experiments.exit_codes import UNCONNECTED
from experiments.training import json_files

if TYPE_CHECKING:
    from distributed import Client

CERTIFICATES = (
    "DASK_DISTRIBUTED__COMM__TLS__CA_FILE, …__CLIENT__CERT and …__CLIENT__KEY"
)

ANSWER = 30.0  # seconds for a scheduler to answer


class SchedulerFile(TypedDict):
    """A scheduler's file, as far as it is read."""

    address: str


class Unreachable(BadRequest):
    """No scheduler answers; the message is one line for the user."""

    code = UNCONNECTED


def check_installed(flag: str) -> None:
    """Raises a BadRequest if Dask, which a flag needs, is not installed."""
    if importlib.util.find_spec("distributed") is None:
        raise BadRequest(
            f"{flag} needs Dask, which is not installed: pip install -e '.[cluster]' "
            "in the checkout"
        )


def connect(scheduler: str, seconds: float) -> "Client":
    """Connects to a scheduler that runs.

    The certificates of tls:// are those of Dask's own settings: `CERTIFICATES`.

    Args:
        scheduler: tcp://HOST:PORT, tls://HOST:PORT or a scheduler file.
        seconds: how long to wait for its answer.

    Raises:
        BadRequest: Dask is not installed, or the text has another form.
        Unreachable: nothing answers there, or not to us.
    """
    address = reach(scheduler, seconds)
    from distributed import Client

    with _explained(scheduler):
        return Client(address, timeout=seconds, set_as_default=False)


def reach(scheduler: str, seconds: float) -> str:
    """Connects for a moment, and returns the address; the errors are `connect`'s."""
    check_installed("--scheduler")
    silence()
    # It takes longer than --help may, which reads this file.
    import asyncio

    address = _address(scheduler)
    # A client that fails to connect holds the interpreter's end up for seconds.
    with _explained(scheduler):
        asyncio.run(_knock(address, seconds))
    return address


@contextmanager
def _explained(scheduler: str) -> Iterator[None]:
    """Raises Dask's errors in one line."""
    try:
        yield
    except OSError as error:
        reason = " ".join(str(error).split())
        raise Unreachable(f"no scheduler answers at {scheduler}: {reason}") from error
    # Dask's own words for a text that is no address, for missing certificates, or for a
    # scheduler of another Python or Dask.
    except (ValueError, TypeError, ImportError) as error:
        reason = " ".join(str(error).split())
        if "ssl" in reason:
            reason = f"it needs certificates: set {CERTIFICATES}"
        raise BadRequest(f"--scheduler {scheduler}: {reason}") from error


def _address(scheduler: str) -> str:
    """Returns the address of a scheduler, which a scheduler file holds."""
    if "://" in scheduler:
        return scheduler
    try:
        return json_files.read(Path(scheduler), SchedulerFile)["address"]
    except (OSError, ValueError):
        raise BadRequest(
            "--scheduler must be tcp://HOST:PORT, tls://HOST:PORT or a scheduler file, "
            f"got {scheduler!r}"
        ) from None


async def _knock(address: str, seconds: float) -> None:
    """Connects once, and closes; raises what Dask raises."""
    from distributed import Security
    from distributed.comm.core import connect

    arguments = Security().get_connection_args("client")
    await (await connect(address, timeout=seconds, **arguments)).close()


@contextmanager
def cluster(scheduler: str | None, jobs: int) -> Iterator["Client"]:
    """Yields a client of a scheduler, or of a cluster in this process.

    Args:
        scheduler: its address or file; None starts a cluster.
        jobs: workers of that cluster. They are threads: each job's work is done by a
            child process, so that nothing listens but the dashboard, at 127.0.0.1.

    Raises:
        BadRequest: Dask is not installed, or the address has another form.
        Unreachable: no scheduler answers.
    """
    if scheduler is not None:
        with connect(scheduler, ANSWER) as client:
            yield client
        return
    check_installed("--jobs")
    silence()
    from distributed import Client, LocalCluster

    own = LocalCluster(
        n_workers=jobs,
        threads_per_worker=1,
        processes=False,
        dashboard_address="127.0.0.1:0",
        worker_dashboard_address="127.0.0.1:0",
        memory_limit=None,  # the models are in the child processes
    )
    with own, Client(own, set_as_default=False) as client:
        yield client


def dashboard(client: "Client") -> str:
    """Returns the address of the scheduler's pages, for a browser."""
    link = client.dashboard_link or "none"
    # Dask names the machine's own address, whatever the pages are bound to.
    if client.cluster is not None and (port := urlsplit(link).port):
        link = f"http://127.0.0.1:{port}/status"
    if importlib.util.find_spec("bokeh") is None and client.cluster is not None:
        link += " (its pages need bokeh: pip install bokeh)"
    return link


def silence() -> None:
    """Drops Dask's own log lines: what matters of them is said in one line by us."""
    # Its import sets the levels of its loggers.
    from distributed.versions import VersionMismatchWarning

    # A table; the workers that differ are refused by name.
    warnings.simplefilter("ignore", VersionMismatchWarning)
    names = ("distributed", "tornado", "bokeh")
    for name in (*names, *logging.root.manager.loggerDict):
        if name.partition(".")[0] in names:
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
