"""The flags of runs in several processes, and schedulers that start them."""

import inspect
import os
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import pytest
from jax._src.clusters import cloud_tpu_cluster  # jax has no public way to ask
from support.certificates import Authority
from support.commands import PROGRAM, EndedRun, execute, together
from support.tiers import tiers

from experiments.command.errors import BadRequest
from experiments.processes.group import find_requested_processes
from experiments.processes.join import Unconnected, check_tls, join
from experiments.processes.network import free_port
from experiments.training.config import parse
from experiments.training.process_group import ALONE, ProcessGroup

PORT = free_port()
BY_HAND = "--coordinator a:9999 --process-id 1 --num-processes 4"


@pytest.mark.parametrize(
    "command, expected",
    [
        ("", ALONE),
        ("--processes 1", ALONE),
        ("--processes 4", ProcessGroup(processes=4)),
        (BY_HAND, ProcessGroup(1, 4, coordinator="a:9999")),
        (f"{BY_HAND} --process-id 0", ProcessGroup(0, 4, coordinator="a:9999")),
    ],
)
def test_flags_say_which_processes_there_are(command, expected):
    assert find_requested_processes(parse(command.split())) == expected


@pytest.mark.parametrize(
    "command, words",
    [
        (f"--processes 2 {BY_HAND}", "use one way only"),
        (f"--distributed auto {BY_HAND}", "use one way only"),
        ("--distributed auto --process-id 1", "--process-id also needs --coordinator"),
        ("--coordinator a:9999 --process-id 0", "also needs --num-processes"),
        ("--coordinator a:9999 --num-processes 2", "also needs --process-id"),
        (f"{BY_HAND} --process-id 4", "must be 0 to 3 with --num-processes 4, got 4"),
        (f"{BY_HAND} --coordinator a", "--coordinator must be"),
        ("--processes 2 --backend vmap", "in 2 processes: use pmap or shard_map"),
        (
            f"{BY_HAND} --max-restarts 1",
            "exit code 75, and their scheduler may restart",
        ),
    ],
)
def test_flags_that_do_not_go_together_are_refused(command, words):
    with pytest.raises(BadRequest) as refused:
        find_requested_processes(parse(command.split()))
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "number, coordinator, words",
    [
        (1, "127.0.0.1:1", r"process 1 could not reach .* at 127.0.0.1:1 in 0.01 s \("),
        (1, "no-such-host.invalid:1", "process 1 could not reach process 0 at no-such"),
        (1, "a..b:1", "process 1 could not reach process 0 at a..b:1 in "),
        (0, "127.0.0.1:{taken}", "cannot listen on port {taken}: Address already in "),
        (
            0,
            "203.0.113.7:1",
            "203.0.113.7, which is not an address of this machine: set --coordinator",
        ),
    ],
)
def test_process_that_finds_no_other_says_why(number, coordinator, words):
    with socket.create_server(("127.0.0.1", 0)) as sock:
        used_port = sock.getsockname()[1]
        group = ProcessGroup(number, 2, coordinator=coordinator.format(taken=used_port))
        with pytest.raises(Unconnected, match=words.format(taken=used_port)):
            join(parse(["--init-timeout", "0.01"]), group, print)


FILES = ("JAX_MTLS_CERT_FILE", "JAX_MTLS_KEY_FILE", "JAX_MTLS_CA_FILE")
PREFIX = "JAX_MTLS_PEER_URI_PREFIX"
FIRST_PROCESS = ProcessGroup(0, 2, coordinator="127.0.0.1:1")
HAS_TLS = "mtls_cert_file" in inspect.signature(jax.distributed.initialize).parameters
UNUSED = (
    "/nowhere.pem: No such file"
    if HAS_TLS
    else "is set, but jax .* does not support TLS"
)


@pytest.mark.parametrize(
    "variables, words",
    [
        ((), None),
        (FILES[:2], f"{FILES[0]} is set, but not {FILES[2]}: TLS needs both"),
        ([PREFIX], f"{PREFIX} is set, but not {FILES[0]}: TLS needs both"),
        (FILES, UNUSED),
    ],
)
def test_certificates_that_would_not_be_used_are_refused(variables, words, monkeypatch):
    for name in [name for name in os.environ if name.startswith("JAX_MTLS")]:
        monkeypatch.delenv(name)
    for name in variables:
        monkeypatch.setenv(name, "/nowhere.pem")
    if words is None:
        return check_tls(FIRST_PROCESS)
    with pytest.raises(BadRequest, match=words):
        check_tls(FIRST_PROCESS)


class CertificateCase(NamedTuple):
    """A certificate for the process 0 of --coordinator, which is at 127.0.0.1.

    Attributes:
        signed: arguments of `Authority.sign`.
        words: what the refusal says of its file; None if it is taken.
        coordinator: the host of process 0.
        uri_prefix: the variable of jax.
        process: the process that has the certificate.
    """

    signed: dict[str, Any]
    words: str | None
    coordinator: str = "127.0.0.1"
    uri_prefix: str = ""
    process: int = 0


OTHER_HOST = "not for {0}, to which other processes connect .--coordinator.: make a"
CERTIFICATES = {
    "good": CertificateCase({}, None),
    "wildcard": CertificateCase({"hosts": "DNS:*.x.org"}, None, "a.x.org"),
    "common name": CertificateCase({"hosts": "", "name": "a"}, None, "a"),
    "expired": CertificateCase(
        {"days": (-3, -1)}, r"expired on 20\d\d-\d\d-\d\d \d\d:\d\d UTC: make"
    ),
    "expired and of another host": CertificateCase(
        {"days": (-3, -1), "hosts": "DNS:a"}, "expired on 20"
    ),
    "not yet valid": CertificateCase(
        {"days": (1, 3)}, r"is not valid yet: it starts on 20\d\d-.* UTC: wait, or set"
    ),
    "another host": CertificateCase(
        {"hosts": "DNS:a,IP:10.0.0.1"}, f"is for a, 10.0.0.1, {OTHER_HOST}"
    ),
    "another common name": CertificateCase(
        {"hosts": "", "name": "a"},
        rf"is for its subject's name alone .a., {OTHER_HOST}",
        "b",
    ),
    # As gRPC of jax 0.12 refuses them, too.
    "address as common name": CertificateCase(
        {"hosts": "", "name": "127.0.0.1"},
        rf"is for its subject's name alone .127.0.0.1., {OTHER_HOST}",
    ),
    "common name beside an address": CertificateCase(
        {"hosts": "IP:10.0.0.1", "name": "a"}, f"is for 10.0.0.1, {OTHER_HOST}", "a"
    ),
    "another host, of a client": CertificateCase({"hosts": "DNS:a"}, None, process=1),
    "a client's": CertificateCase(
        {"usage": "clientAuth"}, "lacks the extendedKeyUsage serverAuth: make a"
    ),
    "a client's, of a client": CertificateCase(
        {"usage": "clientAuth"}, None, process=1
    ),
    "a server's": CertificateCase(
        {"usage": "serverAuth"}, "lacks the extendedKeyUsage clientAuth: make a"
    ),
    "prefix": CertificateCase({"hosts": "URI:id://a/b"}, None, uri_prefix="id://a/"),
    "another prefix": CertificateCase(
        {"hosts": "URI:id://c/b"},
        r"has no URI that begins with id://a/ .its URIs: id://c/b.: make a",
        uri_prefix="id://a/",
    ),
}


@pytest.fixture(scope="module")
def authorities(tmp_path_factory) -> dict[str, Authority]:
    """One whose certificate is valid, a stranger, and one whose has expired."""
    folder = tmp_path_factory.mktemp("authorities")
    return {
        "valid": Authority(folder / "valid"),
        "other": Authority(folder / "other"),
        "expired": Authority(folder / "expired", days=(-3, -1)),
    }


@pytest.fixture
def jax_with_tls(monkeypatch):
    """Has the jax of the tests take certificates, as jax 0.12 does."""

    def initialize(mtls_cert_file=None) -> None:
        raise AssertionError

    monkeypatch.setattr("jax.distributed.initialize", initialize)


def use(monkeypatch, pair: Sequence[Path], authority: Path, uri_prefix="") -> None:
    """Sets jax's variables."""
    for name, path in zip(FILES, (*pair, authority), strict=True):
        monkeypatch.setenv(name, str(path))
    monkeypatch.setenv(PREFIX, uri_prefix)


@pytest.mark.parametrize("name", CERTIFICATES)
def test_a_certificate_that_cannot_be_used_is_named(
    name, authorities, jax_with_tls, monkeypatch
):
    case = CERTIFICATES[name]
    pair = authorities["valid"].sign(**case.signed)
    use(monkeypatch, pair, authorities["valid"].path, case.uri_prefix)
    coordinator = f"{case.coordinator}:1"
    group = ProcessGroup(case.process, 2, coordinator=coordinator)
    if case.words is None:
        return check_tls(group)
    words = f"^{FILES[0]} {pair[0]} {case.words.format(case.coordinator)}"
    with pytest.raises(BadRequest, match=words) as refused:
        check_tls(group)
    assert refused.value.code == 2


def test_an_authority_that_cannot_be_used_is_named(
    authorities, jax_with_tls, monkeypatch
):
    own_authority, other_authority, expired = authorities.values()
    pair = own_authority.sign()
    for process in (0, 1):
        group = ProcessGroup(process, 2, coordinator="127.0.0.1:1")
        use(monkeypatch, pair, other_authority.path)
        words = (
            f"{FILES[0]} {pair[0]} is refused by the authority in "
            f"{other_authority.path}: .*: "
        )
        with pytest.raises(BadRequest, match=f"^{words}set {FILES[2]} to the"):
            check_tls(group)
        use(monkeypatch, expired.sign(), expired.path)
        words = f"^{FILES[2]} {expired.path} expired on 20.*: make"
        with pytest.raises(BadRequest, match=words):
            check_tls(group)
        use(monkeypatch, (pair[0], own_authority.sign()[1]), own_authority.path)
        words = f"{FILES[1]} .* is not the key of the certificate in {pair[0]}: "
        with pytest.raises(BadRequest, match=words):
            check_tls(group)


def test_an_authoritys_file_may_hold_others_that_have_expired(
    authorities, jax_with_tls, monkeypatch, tmp_path
):
    own_authority, other_authority, expired = authorities.values()
    bundle = tmp_path / "bundle.pem"
    texts = [x.path.read_text() for x in (expired, other_authority, own_authority)]
    bundle.write_text("".join(texts))
    use(monkeypatch, own_authority.sign(), bundle)
    check_tls(FIRST_PROCESS)


def test_a_prefix_without_a_slash_is_refused(authorities, jax_with_tls, monkeypatch):
    authority = authorities["valid"]
    use(monkeypatch, authority.sign("URI:id://a/b"), authority.path, "id://a")
    with pytest.raises(BadRequest, match=f"{PREFIX} must end with a slash, got id://a"):
        check_tls(FIRST_PROCESS)


def test_no_process_joins_where_certificates_would_not_be_used(monkeypatch):
    monkeypatch.setenv(FILES[0], "/nowhere.pem")
    with pytest.raises(BadRequest, match=f"{FILES[0]} is set"):
        join(parse([]), ProcessGroup(1, 2, coordinator="127.0.0.1:1"), print)


def slurm(process):
    """Slurm's variables for a step of two tasks on one node."""
    return {
        "SLURM_JOB_ID": 4000 + os.getpid() % 90,  # of which jax makes the port
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_NTASKS": 2,
        "SLURM_PROCID": process,
        "SLURM_LOCALID": process,
        "SLURM_STEP_NUM_NODES": 1,
    }


def torch(process):
    """The variables of torchrun and Kubeflow."""
    return {
        "RANK": process,
        "WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": PORT,
    }


def skypilot(process):
    """SkyPilot's variables; its port is the default one, or jax's."""
    return {
        "SKYPILOT_NODE_RANK": process,
        "SKYPILOT_NUM_NODES": 2,
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2",
        "JAX_COORDINATOR_PORT": PORT,
    }


def slices(process):
    """The variables of GKE for hosts of TPUs: two slices of two."""
    return {
        "TPU_WORKER_HOSTNAMES": "a,b",
        "TPU_WORKER_ID": process % 2,
        "MEGASCALE_NUM_SLICES": 2,
        "MEGASCALE_SLICE_ID": process // 2,
        "MEGASCALE_COORDINATOR_ADDRESS": "127.0.0.1:8080",
        "JAX_COORDINATOR_PORT": PORT,
    }


AUTO = ["--distributed", "auto"]


@pytest.mark.parametrize(
    "variables, expected",
    [
        (torch(1), ProcessGroup(1, 2, coordinator=f"127.0.0.1:{PORT}")),
        (
            torch(1) | {"MASTER_ADDR": "::1"},
            ProcessGroup(1, 2, coordinator=f"[::1]:{PORT}"),
        ),
        (
            torch(0) | {"TORCHELASTIC_RUN_ID": "none"},
            ProcessGroup(0, 2, coordinator=f"127.0.0.1:{PORT + 1}"),
        ),
        (skypilot(1), ProcessGroup(1, 2, coordinator=f"127.0.0.1:{PORT}")),
        (
            skypilot(0) | {"JAX_COORDINATOR_PORT": ""},
            ProcessGroup(0, 2, coordinator="127.0.0.1:9999"),
        ),
        # The nearest starter comes first.
        (slurm(0) | skypilot(1), ProcessGroup(1, 2, coordinator=f"127.0.0.1:{PORT}")),
        (skypilot(0) | torch(1), ProcessGroup(1, 2, coordinator=f"127.0.0.1:{PORT}")),
    ],
    ids=["torch", "IPv6", "torchrun", "SkyPilot", "its port", "Slurm too", "both"],
)
def test_variables_say_who_a_process_is(variables, expected, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    assert find_requested_processes(parse(AUTO)) == expected


def test_hosts_of_tpus_are_counted_slice_by_slice(monkeypatch):
    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    for process in range(4):
        for name, value in slices(process).items():
            monkeypatch.setenv(name, str(value))
        expected = ProcessGroup(process, 4, coordinator=f"127.0.0.1:{PORT}")
        assert find_requested_processes(parse(AUTO)) == expected


@pytest.mark.parametrize(
    "variables, words",
    [
        (torch("one"), "RANK must be a whole number, got 'one'"),
        (torch(2), "process must be 0 to 1 with 2 processes, got 2"),
        (torch(0) | {"MASTER_PORT": "-1"}, "MASTER_PORT must be a whole number"),
        (
            torch(0) | {"MASTER_PORT": "65535", "TORCHELASTIC_RUN_ID": "none"},
            "HOST:PORT, .* got '127.0.0.1:65536'",
        ),
        (skypilot(0) | {"SKYPILOT_NODE_IPS": " "}, r"RANK, .* SKYPILOT_.*: set --coo"),
        (slurm(1) | {"SLURM_STEP_NODELIST": "::1"}, "HOST:PORT, .* got '::1:6"),
    ],
)
def test_variables_that_make_no_sense_are_refused(variables, words, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(BadRequest, match=words):
        find_requested_processes(parse(AUTO))


# Bound to one core, XLA would round otherwise than on two.
MPIRUN = "mpirun --bind-to none --allow-run-as-root --oversubscribe -n 2"


@pytest.mark.parametrize("scheduler", tiers(["slurm", "mpirun"], slow=["slurm"]))
def test_processes_that_a_scheduler_started_find_each_other(scheduler, tmp_path):
    if scheduler == "mpirun" and not shutil.which("mpirun"):
        pytest.skip("mpirun is not installed")
    command = "--steps 32 --eval-every 16"
    words = [*PROGRAM, *command.split(), "--distributed", "auto"]
    words += ["--out", str(tmp_path / "out")]
    if scheduler == "mpirun":
        started = [([*MPIRUN.split(), *words], {})]
    else:
        started = [(words, slurm(process)) for process in (0, 1)]
    ended = together([(x, {"JAX_NUM_CPU_DEVICES": 1, **y}) for x, y in started])
    assert [code for code, *_ in ended] == [0] * len(started), ended
    # The first speaks.
    assert sum("test accuracy" in text for _, text, _ in ended) == 1
    ended = EndedRun(0, "", "", tmp_path / "out")
    alone = execute(command, tmp_path / "alone")
    assert ended.summary["params_sha256"] == alone.summary["params_sha256"]
