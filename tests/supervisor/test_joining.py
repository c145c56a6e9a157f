"""The flags of runs in several processes, and schedulers that start them."""

import inspect
import os
import shutil
import socket

import jax
import pytest
from commands import PROGRAM, Run, execute, together
from jax._src.clusters import cloud_tpu_cluster  # jax has no public way to ask
from tiers import tiers

from experiments.command.errors import BadRequest
from experiments.processes.group import requested
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
    assert requested(parse(command.split())) == expected


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
        requested(parse(command.split()))
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "number, at, words",
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
def test_process_that_finds_no_other_says_why(number, at, words):
    with socket.create_server(("127.0.0.1", 0)) as sock:
        taken = sock.getsockname()[1]
        group = ProcessGroup(number, 2, coordinator=at.format(taken=taken))
        with pytest.raises(Unconnected, match=words.format(taken=taken)):
            join(parse(["--init-timeout", "0.01"]), group, print)


FILES = ("JAX_MTLS_CERT_FILE", "JAX_MTLS_KEY_FILE", "JAX_MTLS_CA_FILE")
PREFIX = "JAX_MTLS_PEER_URI_PREFIX"
HAS_TLS = "mtls_cert_file" in inspect.signature(jax.distributed.initialize).parameters
UNUSED = (
    "/nowhere.pem: No such file"
    if HAS_TLS
    else "is set, but jax .* does not support TLS"
)


@pytest.mark.parametrize(
    "given, words",
    [
        ((), None),
        (FILES[:2], f"{FILES[0]} is set, but not {FILES[2]}: TLS needs both"),
        ([PREFIX], f"{PREFIX} is set, but not {FILES[0]}: TLS needs both"),
        (FILES, UNUSED),
    ],
)
def test_certificates_that_would_not_be_used_are_refused(given, words, monkeypatch):
    for name in [name for name in os.environ if name.startswith("JAX_MTLS")]:
        monkeypatch.delenv(name)
    for name in given:
        monkeypatch.setenv(name, "/nowhere.pem")
    if words is None:
        return check_tls()
    with pytest.raises(BadRequest, match=words):
        check_tls()


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
    assert requested(parse(AUTO)) == expected


def test_hosts_of_tpus_are_counted_slice_by_slice(monkeypatch):
    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    for process in range(4):
        for name, value in slices(process).items():
            monkeypatch.setenv(name, str(value))
        expected = ProcessGroup(process, 4, coordinator=f"127.0.0.1:{PORT}")
        assert requested(parse(AUTO)) == expected


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
        requested(parse(AUTO))


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
    ended = Run(0, "", "", tmp_path / "out")
    alone = execute(command, tmp_path / "alone")
    assert ended.summary["params_sha256"] == alone.summary["params_sha256"]
