"""Joins the processes of a run by jax.distributed, and checks that they agree."""

import inspect
import json
import os
import re
import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax

from experiments import files
from experiments.command import stopping
from experiments.command.errors import BadRequest, in_one_line, place, summarize_error
from experiments.command.words import flag_name
from experiments.processes import certificates, network
from experiments.training import run_folder
from experiments.training.config import RunConfig
from experiments.training.machine import versions
from experiments.training.process_group import ProcessGroup

GRACE = 1.0  # seconds for other processes to end for the same reason
# Seconds for all to notice a lost process, and to read messages in process 0's service.
LINGERING = 3.0
SLACK = 30.0  # seconds that jax waits longer than we do: it aborts at its time limit
LOOK = 0.1  # seconds between two checks for a signal
LOST_AFTER = 20  # seconds without a sign of life before jax counts a process as lost
MAX_SHOWN = 3  # the number of differences that a message names

# jax has no error type for a lost process, and each backend has its own text. Errors of
# a user's callback have jax's type, too, with the user's text.
_LOSS_MESSAGE = re.compile(
    "(?!.*callback error).*(?:gloo|nccl|coordination|broken pipe|socket closed|"
    "connection (?:reset|closed|refused)|unavailable|deadline_exceeded|timed out)",
    re.IGNORECASE,
)

# jax (from 0.12) needs all three of these files for mutual TLS.
_TLS = ("JAX_MTLS_CERT_FILE", "JAX_MTLS_KEY_FILE", "JAX_MTLS_CA_FILE")
_URI_PREFIX = "JAX_MTLS_PEER_URI_PREFIX"


Train = Callable[[RunConfig, ProcessGroup], int]
"""Makes the run of a config in a `group` of processes, and returns its exit code."""


class Unconnected(Exception):
    """The processes do not find each other; the message is one line."""


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


class Member:
    """This process among those of a run; an error in one of them ends all.

    Args:
        group: the number of this process, and of all, and the address of process 0.
        read_signal: called before each dispatch.
        has_starter: whether a command of ours started all processes here. It ends them
            at a second signal, and they share its terminal.
    """

    def __init__(
        self, group: ProcessGroup, read_signal: stopping.ReadSignal, has_starter: bool
    ):
        self._group = group
        self._has_starter = has_starter
        self._read_signal = read_signal
        self._errors = stopping.sole_output(group.is_first)
        self._ending = threading.Lock()

    def run(self, config: RunConfig, train: Train) -> int:
        """Joins, trains and leaves.

        Returns:
            The exit code. The process may also end at once, because another process is
            gone or because jax aborts it in C++ (exit code 134) when its service misses
            one.
        """
        if not self._has_starter:
            _end_at_second_signal()
        try:
            return self._run(config, train)
        except Unconnected as error:
            self._say(str(error))
            stopping.end(stopping.UNCONNECTED)
        except BadRequest as error:
            self._refuse(f"error: {in_one_line(error)}", error.code)
        except Exception as error:
            if tells_of_loss(error):
                self._lost(summarize_error(error))
            for line in traceback.format_exc().splitlines():
                self._say(line)
            self._refuse(summarize_error(error), stopping.FAILED)

    def _run(self, config: RunConfig, train: Train) -> int:
        number = self._group.process
        hellos = join(config, self._group, self._say)
        line = difference(hellos)
        if line:
            # All together: otherwise jax would report the first that leaves as lost.
            jax.distributed.shutdown()
            self._end(stopping.UNCONNECTED, line)
        is_leaving = threading.Event()
        watch = threading.Thread(target=self._watch, args=(is_leaving,), daemon=True)
        watch.start()
        # Groups of `hierarchical` follow the hosts, not the processes: otherwise two
        # processes on one host would give other results than one process.
        hosts = [tuple(hello.host) for hello in hellos]
        local, sharing = place_on_host(hosts, number)
        if sharing > 1:  # it takes its own GPUs, before jax looks for devices
            devices_each = config.mesh_devices(len(hellos)) or 1
            own_devices = ",".join(
                str(local * devices_each + i) for i in range(devices_each)
            )
            for kind in ("cuda", "rocm"):
                jax.config.update(f"jax_{kind}_visible_devices", own_devices)
        if number and not self._has_starter:
            self._say(
                f"process {number} of {len(hellos)} has joined; process 0 shows the "
                "progress"
            )
        group = self._group._replace(
            hosts=len(set(hosts)), sharing=sharing, note=self._note
        )
        code = train(replace(config, out=config.out or Path(hellos[0].out)), group)
        is_leaving.set()
        watch.join()
        jax.distributed.shutdown()
        return code

    def _refuse(self, text: str, code: int) -> NoReturn:
        """Ends this process, and thereby the run; tells the others why."""
        store = _store()
        if store is not None:
            with suppress(RuntimeError):  # the service itself is gone
                reason = json.dumps([code, text])
                store.key_value_set(f"refusal/{self._group.process}", reason)
            self._linger()
        self._end(code, text)

    def _lost(self, text: str) -> NoReturn:
        """Ends this process because another one is gone, or refused to continue."""
        line = f"another process is gone ({text})"
        if self._group.processes == 2:
            line = f"process {1 - self._group.process} is gone ({text})"
        time.sleep(GRACE)
        try:
            self._follow()
        except RuntimeError:
            line = f"process 0 at {self._group.coordinator} is gone ({text})"
        self._linger()
        number = self._read_signal()
        code = stopping.stop_code(number) if number else stopping.TERMINATED
        self._end(code, line)

    def _end(self, code: int, text: str) -> NoReturn:
        """Ends this process at once, without a shutdown that waits for others."""
        # Several threads may notice the same failure.
        self._ending.acquire()
        # In one terminal, process 0 alone says what all processes know.
        if self._group.is_first or not self._has_starter:
            self._say(text)
        stopping.end(code)

    def _watch(self, is_leaving: threading.Event) -> None:
        """Ends this process once another one has refused to continue."""
        # This process may wait for the other in a call in which gloo and NCCL do not
        # notice that it is gone.
        with suppress(RuntimeError):  # the main thread, or jax, is about to notice
            while not is_leaving.wait(GRACE):
                self._follow()

    def _follow(self) -> None:
        """Ends this process if another one has refused to continue.

        Raises:
            RuntimeError: process 0 is gone.
        """
        if not _store().key_value_dir_get("refusal/"):
            return
        time.sleep(GRACE)  # if all refuse for the same reason, each shows its own line
        for key, words in sorted(_store().key_value_dir_get("refusal/")):
            number = int(key.rpartition("/")[2])
            if number != self._group.process:
                code, reason = json.loads(words)
                self._linger()
                self._end(code, f"process {number}: {reason}")

    def _linger(self) -> None:
        """Keeps jax's service running while the others read its messages."""
        if self._group.is_first:
            time.sleep(LINGERING)

    def _note(self, text: str) -> None:
        """Shows the user a line that another process may show, too."""
        number = self._group.process
        self._say(f"process {number}: {text}" if number else text)

    def _say(self, text: str) -> None:
        """Shows the user a line, from any process."""
        print(stopping.printable(text), file=self._errors, flush=True)


def _end_at_second_signal() -> None:
    """Makes a second signal end this process, even while it waits in a collective."""
    # Python's handlers run only when the main thread is back from C++, perhaps never;
    # the numbers of signals arrive in this pipe at once.
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def wait() -> None:
        number = os.read(read, 1)[0]
        os.read(read, 1)
        # If the main thread is free, it ends the process itself, with a message.
        time.sleep(GRACE)
        stopping.end(stopping.stop_code(number))

    threading.Thread(target=wait, daemon=True).start()


def join(
    config: RunConfig, group: ProcessGroup, log: Callable[[str], None]
) -> list[Hello]:
    """Joins the other processes; `difference` then checks that they agree.

    Args:
        config: the config, on which all processes must agree.
        group: the number of this process, and of all, and the address of process 0.
        log: shows the user a line.

    Returns:
        The introductions of all processes, in their order.

    Raises:
        Unconnected: the processes cannot find each other. In other cases jax aborts.
        BadRequest: jax cannot use the given certificates.
    """
    check_tls(group)
    where = group.coordinator
    seconds = config.init_timeout
    if group.is_first:
        _check_port(where, log)
    else:
        # If process 0 never listened, jax would abort in C++ without a reason.
        reason = network.reach(*network.address(where), seconds)
        if reason:
            raise Unconnected(
                f"process {group.process} could not reach process 0 at {where} in "
                f"{seconds:g} s ({reason}): check that process 0 runs, and that this "
                "is its address (--coordinator)"
            )
    _connect_within(seconds, group)
    return _exchange(config, group)


def _check_port(coordinator: str, log: Callable[[str], None]) -> None:
    """Checks that process 0 can listen at its address."""
    host, port = network.address(coordinator)
    own_address = network.find_own_address(host)
    if own_address is None and network.is_address(host):
        raise Unconnected(
            f"process 0 cannot listen at {host}, which is not an address of this "
            "machine: set --coordinator to an address of this machine"
        )
    # Such as a load balancer's name, or a name that DNS does not know yet.
    if own_address is None:
        log(
            f"{host} is not an address of this machine: process 0 listens at all its "
            "addresses; set --coordinator to one of them to listen only there"
        )
    try:
        # gRPC would silently share the port with the process 0 of another run.
        network.listen(own_address, port).close()
    except OSError as error:
        raise Unconnected(
            f"process 0 cannot listen on port {port}: {os.strerror(error.errno or 0)}"
        ) from error


def _connect_within(seconds: float, group: ProcessGroup) -> None:
    """Starts jax among the other processes, or raises Unconnected."""
    # In a separate thread: Python handles a signal only when the main thread is back
    # from C++, and jax ends a long wait by an abort.
    place = (group.coordinator, group.process, group.processes)
    answer = ThreadPoolExecutor(1).submit(connect, *place, seconds + SLACK)
    deadline = time.monotonic() + seconds
    # Short waits: a signal that comes just before a wait, or to another thread, does
    # not end it; its handler runs when the main thread is back.
    while not answer.done() and time.monotonic() < deadline:
        wait([answer], LOOK)
    try:
        answer.result(0)
    except TimeoutError:
        raise Unconnected(
            f"process {group.process} waited {seconds:g} s (--init-timeout) at "
            f"{group.coordinator}, but not all {group.processes} processes connected"
        ) from None
    except Exception as error:  # of jax, of any kind
        line = str(error).partition("\n")[0]
        raise Unconnected(f"{group.coordinator}: {line}") from error


def connect(coordinator: str, process: int, processes: int, seconds: float) -> None:
    """Starts jax among the other processes.

    Args:
        coordinator: HOST:PORT of jax's service, which process 0 runs.
        process: the number of this process.
        processes: the number of processes.
        seconds: seconds to wait for the other processes.

    Raises:
        RuntimeError: jax could not connect; in most cases it aborts the process
            instead.
        OSError: the network has no route to the coordinator.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # jax's own handler of SIGTERM would replace ours.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        coordinator,
        processes,
        process,
        # Otherwise jax would ask Slurm or Kubernetes which devices to use.
        cluster_detection_method="deactivate",
        initialization_timeout=max(1, round(seconds)),
        coordinator_bind_address=network.listen_towards(coordinator),
        heartbeat_timeout_seconds=LOST_AFTER,
    )


def _store() -> Any:
    """Returns the client of jax's service, which keeps values for all processes."""
    # jax offers no public access to it; orbax uses the same private module.
    from jax._src import distributed

    return distributed.global_state.client


def _exchange(config: RunConfig, group: ProcessGroup) -> list[Hello]:
    """Sends this process's introduction to all, and returns theirs."""
    values = config.values("run", "start")
    facts = {
        flag_name(name): files.to_json_value(value) for name, value in values.items()
    }
    facts |= {"--num-processes": group.processes, **versions()}
    out = config.out or run_folder.default_out(config.task, config.algo)
    hello = Hello([*network.host()], facts, str(out))
    # Not by a collective: it uses the devices of all processes, and hangs if the
    # processes disagree on their number.
    store = _store()
    milliseconds = max(1000, round(config.init_timeout * 1000))
    store.key_value_set(f"hello/{group.process}", json.dumps(hello))
    names = [f"hello/{i}" for i in range(group.processes)]
    texts = [store.blocking_key_value_get(name, milliseconds) for name in names]
    return [Hello(*json.loads(text)) for text in texts]


def difference(hellos: Sequence[Hello]) -> str | None:
    """Reports the facts in which processes differ from process 0, in one line.

    Args:
        hellos: the introductions of all processes, in their order.

    Returns:
        The line; None if all agree.
    """
    first_facts = hellos[0].facts
    other_facts = next((x.facts for x in hellos if x.facts != first_facts), None)
    if other_facts is None:
        return None
    names = [*(first_facts | other_facts)]
    names = [x for x in names if other_facts.get(x) != first_facts.get(x)]
    other_text = _format_facts(names[:MAX_SHOWN], other_facts)
    first_text = _format_facts(names[:MAX_SHOWN], first_facts)
    if len(names) > MAX_SHOWN:
        first_text = f"{first_text} ({len(names) - MAX_SHOWN} more differ)"
    numbers = [str(i) for i, hello in enumerate(hellos) if hello.facts == other_facts]
    if len(numbers) == 1:
        return f"process {numbers[0]} has {other_text}, but process 0 has {first_text}"
    return (
        f"processes {', '.join(numbers[:-1])} and {numbers[-1]} have {other_text}, but "
        f"process 0 has {first_text}"
    )


def _format_facts(names: Sequence[str], facts: Mapping[str, Any]) -> str:
    """Lists facts for a line, such as "--seed 1, no --lr"."""
    texts = []
    for name in names:
        value = facts.get(name)
        if value is None:
            texts.append(f"no {name}")
        elif isinstance(value, str):
            texts.append(f"{name} {value}")
        else:
            texts.append(f"{name} {json.dumps(value, ensure_ascii=False)}")
    return ", ".join(texts)


def place_on_host(hosts: Sequence[Any], process: int) -> tuple[int, int]:
    """Returns the number of a process on its host, and the number of processes there.

    Args:
        hosts: the host of each process.
        process: the number of the process among all.
    """
    host = hosts[process]
    return hosts[:process].count(host), hosts.count(host)


def tells_of_loss(error: Exception) -> bool:
    """Whether an error of jax itself says that another process is gone."""
    # Where a call begins, jax raises a runtime's error as a ValueError.
    kinds = jax.errors.JaxRuntimeError, ValueError
    is_of_jax = isinstance(error, kinds) and not place(error)
    return is_of_jax and _LOSS_MESSAGE.match(summarize_error(error)) is not None


def check_tls(group: ProcessGroup) -> None:
    """Raises a BadRequest for certificates that jax would not use.

    Args:
        group: the number of this process, and the address of process 0.
    """
    names = (*_TLS, _URI_PREFIX)
    settings = {name: os.environ[name] for name in names if os.environ.get(name)}
    if not settings:
        return
    first_name = next(iter(settings))
    missing_names = [name for name in _TLS if name not in settings]
    if missing_names:
        raise BadRequest(
            f"{first_name} is set, but not {missing_names[0]}: TLS needs both"
        )
    parameters = inspect.signature(jax.distributed.initialize).parameters
    if "mtls_cert_file" not in parameters:
        raise BadRequest(
            f"{first_name} is set, but jax {jax.__version__} does not support TLS: "
            "install jax 0.12, or unset the variable"
        )
    uri_prefix = settings.get(_URI_PREFIX, "")
    if uri_prefix and not uri_prefix.endswith("/"):
        raise BadRequest(
            f"{_URI_PREFIX} must end with a slash, got {uri_prefix}: without one, "
            "names of others begin so, too"
        )
    # With a prefix, jax looks at URIs in place of the host.
    host = None if uri_prefix else network.address(group.coordinator)[0]
    certificates.check_certificates(
        {name: settings[name] for name in _TLS},
        is_server=group.is_first,
        host=host,
        uri_prefix=uri_prefix,
    )
