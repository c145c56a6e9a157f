"""Connections to a Dask scheduler: one that runs already, or one of this command."""

import importlib.util
import logging
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from experiments.cli import certificates
from experiments.cli.errors import BadRequest
from experiments.cli.stopping import UNCONNECTED
from experiments.training import files

if TYPE_CHECKING:
    from distributed import Client

TLS = "DASK_DISTRIBUTED__COMM__TLS__"
CERTIFICATES = f"{TLS}CA_FILE, …__CLIENT__CERT and …__CLIENT__KEY"
ANSWER = 30.0  # seconds for a scheduler to answer
WORKER = "--nthreads 1 --memory-limit 0 --death-timeout 60 --host 127.0.0.1"
WORKER += " --dashboard-address 127.0.0.1:0 --local-directory"


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


def reach(scheduler: str, seconds: float) -> str:
    """Tests the connection to a running scheduler, and returns its address.

    For tls://, Dask's own settings name the certificates, which are checked first:
    `CERTIFICATES`.

    Args:
        scheduler: tcp://HOST:PORT, tls://HOST:PORT or a scheduler file.
        seconds: seconds to wait for the answer.

    Raises:
        BadRequest: the text is invalid, or a certificate cannot be used.
        Unreachable: no scheduler answers there.
    """
    silence()
    # Imported late: --help imports this file and must stay fast.
    import asyncio

    address = _address(scheduler)
    if address.startswith("tls://"):
        _check_certificates()
    # A client that fails to connect delays the interpreter's exit for seconds.
    with _explained(scheduler):
        asyncio.run(_knock(address, seconds))
    return address


@contextmanager
def _explained(scheduler: str) -> Iterator[None]:
    """Raises Dask's errors as errors of one line."""
    from distributed.comm.core import FatalCommClosedError

    try:
        yield
    except FatalCommClosedError as error:  # by TLS alone
        raise BadRequest(
            f"--scheduler {scheduler}: it and this command do not trust each other's "
            f"certificates: set {CERTIFICATES} to files of its authority"
        ) from error
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


def _check_certificates() -> None:
    """Raises a BadRequest for certificates that Dask cannot use."""
    from distributed import Security

    found, names = Security(), ("CLIENT__CERT", "CLIENT__KEY", "CA_FILE")
    given = found.tls_client_cert, found.tls_client_key, found.tls_ca_file
    files = {f"{TLS}{x}": file for x, file in zip(names, given, strict=True)}
    # Dask names those that are missing, and takes the text of a file in its place.
    if all(isinstance(x, str) and "\n" not in x for x in files.values()):
        certificates.check(files)


def _address(scheduler: str) -> str:
    """Returns the address of a scheduler, read from a scheduler file if necessary."""
    if "://" in scheduler:
        return scheduler
    with suppress(OSError, files.Damaged):
        address = files.read(Path(scheduler), "address")["address"]
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
def cluster(scheduler: str | None, jobs: int) -> Iterator["Client"]:
    """Yields a client of a running scheduler or of a cluster of this command.

    Args:
        scheduler: the address or file of a scheduler; None starts one here.
        jobs: the number of workers to start for it, at 127.0.0.1.

    Raises:
        BadRequest: the address is invalid.
        Unreachable: no scheduler answers.
    """
    silence()
    from distributed import Client, LocalCluster

    if scheduler is not None:
        with _explained(scheduler):
            address = _address(scheduler)
            client = Client(address, timeout=ANSWER, set_as_default=False)
        with client:
            yield client
        return
    with ExitStack() as held:
        pages = "127.0.0.1:0"
        own: Any = LocalCluster(n_workers=0, host="127.0.0.1", dashboard_address=pages)
        held.enter_context(own)
        scratch = held.enter_context(TemporaryDirectory())
        for _ in range(jobs):
            held.enter_context(_worker(own.scheduler_address, scratch))
        yield held.enter_context(Client(own, set_as_default=False))


@contextmanager
def _worker(address: str, scratch: str) -> Iterator[None]:
    """Starts a Dask worker as a user does, and kills it in the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "dask", "worker", address, *WORKER.split(), scratch],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for this command
    )
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # its nanny and itself
        process.wait()


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
