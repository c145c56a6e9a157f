"""Connections to a Dask scheduler."""

import asyncio
import importlib.util
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.cli.errors import BadRequest

if TYPE_CHECKING:
    from distributed import Client

CERTIFICATES = (
    "DASK_DISTRIBUTED__COMM__TLS__CA_FILE, …__CLIENT__CERT and …__CLIENT__KEY"
)


class Unreachable(Exception):
    """No scheduler answers; the message is one line for the user."""


def check_installed(flag: str) -> None:
    """Raises a BadRequest where Dask is missing, which a flag needs."""
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
    check_installed("--scheduler")
    silence()
    from distributed import Client

    address = _address(scheduler)
    try:
        # A client that fails to connect holds the interpreter's end up for seconds.
        asyncio.run(_knock(address, seconds))
        return Client(address, timeout=seconds, set_as_default=False)
    except OSError as error:
        reason = " ".join(str(error).split())
        raise Unreachable(f"no scheduler answers at {scheduler}: {reason}") from error
    # Dask's own words for a text that is no address, or for missing certificates.
    except (ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        if "ssl" in reason:
            reason = f"it needs certificates: set {CERTIFICATES}"
        raise BadRequest(f"--scheduler {scheduler}: {reason}") from error


def _address(scheduler: str) -> str:
    """Returns the address of a scheduler, which a scheduler file holds."""
    if "://" in scheduler:
        return scheduler
    try:
        return json.loads(Path(scheduler).read_text())["address"]
    except (OSError, ValueError, KeyError, TypeError):
        raise BadRequest(
            "--scheduler must be tcp://HOST:PORT, tls://HOST:PORT or a scheduler file, "
            f"got {scheduler!r}"
        ) from None


async def _knock(address: str, seconds: float) -> None:
    """Connects once, and closes; raises what Dask raises."""
    from distributed import Security
    from distributed.comm import connect

    arguments = Security().get_connection_args("client")
    await (await connect(address, timeout=seconds, **arguments)).close()


def silence() -> None:
    """Drops Dask's own log lines: what matters of them is said in one line by us."""
    import distributed  # noqa: F401 - its import sets the levels of its loggers

    names = ("distributed", "tornado", "bokeh")
    for name in (*names, *logging.root.manager.loggerDict):
        if name.partition(".")[0] in names:
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
