"""Finds the other processes of a run, and checks that they belong together."""

import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, NamedTuple

from experiments.launch import gloo, inspection
from experiments.launch.addresses import address, is_address, listen, own_address, reach
from experiments.launch.membership import Membership
from experiments.training import files, run_folder
from experiments.training.config import RunConfig
from experiments.training.versions import versions

SLACK = 30.0  # seconds that jax waits longer than we do: it aborts at its time limit
LOOK = 0.1  # seconds between two checks for a signal
SHOWN = 3  # the number of differences that a message names


class Hello(NamedTuple):
    """The introduction of a process.

    Attributes:
        host: name, boot and network of its machine, which together identify it.
        facts: the values on which all processes must agree, by the name that the user
            knows, such as "--seed" or "jax"; JSON values, None if not set.
        out: the folder for the run's files; processes without --out use process 0's.
    """

    host: list[str]
    facts: dict[str, Any]
    out: str


class Unconnected(Exception):
    """The processes do not find each other; the message is one line."""


def join(
    config: RunConfig, membership: Membership, log: Callable[[str], None]
) -> list[Hello]:
    """Joins the other processes; `difference` then checks that they agree.

    Args:
        config: the config, on which all processes must agree.
        membership: the number of this process, and of all processes.
        log: shows the user a line.

    Returns:
        The introductions of all processes, in their order.

    Raises:
        Unconnected: the processes cannot find each other. In other cases jax aborts.
        BadRequest: jax cannot use the given certificates.
    """
    gloo.check_tls()
    if membership.process:
        _find(membership, config.init_timeout)
    else:
        _check_port(membership.coordinator, log)
    _connect(membership, config.init_timeout)
    return _exchange(config, membership)


def _find(membership: Membership, seconds: float) -> None:
    """Waits until process 0 listens."""
    # If it never does, jax aborts in C++ without a reason.
    reason = reach(*address(membership.coordinator), seconds)
    if reason is not None:
        raise Unconnected(
            f"process {membership.process} could not reach process 0 at "
            f"{membership.coordinator} in {seconds:g} s ({reason}): check that process "
            "0 runs, and that this is its address (--coordinator)"
        )


def _check_port(coordinator: str, log: Callable[[str], None]) -> None:
    """Checks that process 0 can listen at its address."""
    host, port = address(coordinator)
    own = own_address(host)
    if own is None and is_address(host):
        raise Unconnected(
            f"process 0 cannot listen at {host}, which is not an address of this "
            "machine: set --coordinator to an address of this machine"
        )
    # Such as a load balancer's name, or a name that DNS does not know yet.
    if own is None:
        log(
            f"{host} is not an address of this machine: process 0 listens at all its "
            "addresses; set --coordinator to one of them to listen only there"
        )
    try:
        # gRPC would silently share the port with the process 0 of another run.
        listen(own, port).close()
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        line = f"process 0 cannot listen on port {port}: {reason}"
        raise Unconnected(line) from error


def _connect(membership: Membership, seconds: float) -> None:
    """Starts jax among the other processes."""
    count, process, where = membership
    # In a separate thread: Python handles a signal only when the main thread is back
    # from C++, and jax ends a long wait by an abort.
    words = (where, process or 0, count, seconds + SLACK)
    answer = ThreadPoolExecutor(1).submit(gloo.connect, *words)
    deadline = time.monotonic() + seconds
    # Short waits: a signal that comes just before a wait, or to another thread, does
    # not end it; its handler runs when the main thread is back.
    while not answer.done() and time.monotonic() < deadline:
        wait([answer], LOOK)
    try:
        answer.result(0)
    except TimeoutError:
        raise Unconnected(
            f"process {process} waited {seconds:g} s (--init-timeout) at {where}, but "
            f"not all {count} processes connected"
        ) from None
    except Exception as error:  # of jax, of any kind
        line = str(error).partition("\n")[0]
        raise Unconnected(f"{where}: {line}") from error


def _exchange(config: RunConfig, membership: Membership) -> list[Hello]:
    """Sends this process's introduction to all, and returns theirs."""
    facts = {
        f"--{name.replace('_', '-')}": files.plain(value)
        for name, value in config.values("run", "start").items()
    }
    facts["--num-processes"] = membership.processes
    out = config.out or run_folder.default_out(config.task, config.algo)
    process = membership.process or 0
    hello = Hello([*inspection.host()], facts | versions(), str(out))
    # Not by a collective: it uses the devices of all processes, and hangs if the
    # processes disagree on their number.
    store, milliseconds = gloo.store(), max(1000, round(config.init_timeout * 1000))
    store.key_value_set(f"hello/{process}", json.dumps(hello))
    texts = [
        store.blocking_key_value_get(f"hello/{i}", milliseconds)
        for i in range(membership.processes)
    ]
    return [Hello(*json.loads(text)) for text in texts]


def difference(hellos: Sequence[Hello]) -> str | None:
    """Reports the facts in which processes differ from process 0, in one line.

    Args:
        hellos: the introductions of all processes, in their order.

    Returns:
        The line; None if all agree.
    """
    first, *others = (hello.facts for hello in hellos)
    other = next((facts for facts in others if facts != first), None)
    if other is None:
        return None
    ids = [i for i, hello in enumerate(hellos) if hello.facts == other]
    names = [x for x in {**first, **other} if other.get(x) != first.get(x)]
    theirs, ours = (
        ", ".join(_shown(name, facts.get(name)) for name in names[:SHOWN])
        for facts in (other, first)
    )
    have = "have" if len(ids) > 1 else "has"
    more = f" ({len(names) - SHOWN} more differ)" if len(names) > SHOWN else ""
    return f"{processes(ids)} {have} {theirs}, but process 0 has {ours}{more}"


def _shown(name: str, value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"no {name}" if value is None else f"{name} {text}"


def processes(ids: list[int]) -> str:
    """Names processes: process 1; processes 1, 2 and 3."""
    *most, last = [str(i) for i in sorted(ids)]
    return f"processes {', '.join(most)} and {last}" if most else f"process {last}"


def place_on_host(hosts: Sequence[Any], process: int) -> tuple[int, int]:
    """Returns the number of a process on its host, and the number of processes there.

    Args:
        hosts: the host of each process.
        process: the number of the process among all.
    """
    host = hosts[process]
    return hosts[:process].count(host), hosts.count(host)
