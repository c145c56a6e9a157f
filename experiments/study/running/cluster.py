"""Connections to a Dask scheduler."""

import importlib.util
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING
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


class Unreachable(BadRequest):
    """No scheduler answers; the message is one line for the user."""

    code = UNCONNECTED


def check_installed(flag: str) -> None:
    """Raises a BadRequest if Dask, which a flag needs, is not installed."""
    if importlib.util.find_spec("distributed") is None:
        raise BadRequest(
            f"{flag} needs Dask, which is not installed: run pip install -e "
            "'.[cluster]' in the checkout of syncalgos"
        )


def connect(scheduler: str, seconds: float) -> "Client":
    """Connects to a running scheduler.

    For tls://, Dask's own settings name the certificates: `CERTIFICATES`.

    Args:
        scheduler: tcp://HOST:PORT, tls://HOST:PORT or a scheduler file.
        seconds: seconds to wait for the answer.

    Raises:
        BadRequest: Dask is not installed, or the text is invalid.
        Unreachable: no scheduler answers there.
    """
    address = reach(scheduler, seconds)
    from distributed import Client

    with _explained(scheduler):
        return Client(address, timeout=seconds, set_as_default=False)


def reach(scheduler: str, seconds: float) -> str:
    """Tests the connection and returns the address; raises errors like `connect`."""
    check_installed("--scheduler")
    silence()
    # Imported late: --help imports this file and must stay fast.
    import asyncio

    address = _address(scheduler)
    # A client that fails to connect delays the interpreter's exit for seconds.
    with _explained(scheduler):
        asyncio.run(_knock(address, seconds))
    return address


@contextmanager
def _explained(scheduler: str) -> Iterator[None]:
    """Raises Dask's errors as errors of one line."""
    try:
        yield
    except OSError as error:
        reason = " ".join(str(error).split())
        raise Unreachable(f"--scheduler {scheduler}: no answer: {reason}") from error
    # Dask raises these for an invalid address, for missing certificates, or for a
    # scheduler with another version of Python or Dask.
    except (ValueError, TypeError, ImportError) as error:
        reason = " ".join(str(error).split())
        if "ssl" in reason:
            reason = f"tls:// needs certificates: set {CERTIFICATES}"
        raise BadRequest(f"--scheduler {scheduler}: {reason}") from error


def _address(scheduler: str) -> str:
    """Returns the address of a scheduler, read from a scheduler file if necessary."""
    if "://" in scheduler:
        return scheduler
    with suppress(OSError, json_files.Damaged):
        address = json_files.read(Path(scheduler), "address")["address"]
        if isinstance(address, str):
            return address
    raise BadRequest(
        "--scheduler must be tcp://HOST:PORT, tls://HOST:PORT or a scheduler file, "
        f"got {scheduler!r}"
    )


async def _knock(address: str, seconds: float) -> None:
    """Connects once, and closes; raises Dask's own errors."""
    from distributed import Security
    from distributed.comm.core import connect

    arguments = Security().get_connection_args("client")
    await (await connect(address, timeout=seconds, **arguments)).close()


@contextmanager
def cluster(
    scheduler: str | None, jobs: int, environ: Mapping[str, str]
) -> Iterator["Client"]:
    """Yields a client of a scheduler or of a cluster in this process.

    Args:
        scheduler: the address or file of a scheduler; None starts a cluster here.
        jobs: the number of workers of that cluster, at 127.0.0.1.
        environ: environment variables of these workers.

    Raises:
        BadRequest: Dask is not installed, or the address is invalid.
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
        processes=True,  # jax's devices are set before it starts
        host="127.0.0.1",
        env=dict(environ),
        dashboard_address="127.0.0.1:0",
        worker_dashboard_address="127.0.0.1:0",
        memory_limit=None,
    )
    with own, Client(own, set_as_default=False) as client:
        yield client


def dashboard(client: "Client") -> str:
    """Returns the address of the scheduler's dashboard, for a browser."""
    link = client.dashboard_link or "none"
    # Dask names the machine's own address even if the pages are bound to another.
    if client.cluster is not None and (port := urlsplit(link).port):
        link = f"http://127.0.0.1:{port}/status"
    if importlib.util.find_spec("bokeh") is None and client.cluster is not None:
        link += " (its pages need bokeh: pip install bokeh)"
    return link


def silence() -> None:
    """Silences Dask's log; the important events are reported in one line instead."""
    # Imported first, because the import sets the levels of its loggers.
    from distributed.versions import VersionMismatchWarning

    # The warning is a table; we refuse workers that differ by name instead.
    warnings.simplefilter("ignore", VersionMismatchWarning)
    names = ("distributed", "tornado", "bokeh")
    for name in (*names, *logging.root.manager.loggerDict):
        if name.partition(".")[0] in names:
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
