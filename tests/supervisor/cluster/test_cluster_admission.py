"""Runs on a Dask cluster: who may take part, where processes lie, what is refused."""

import shutil
import signal
import socket
import ssl
import warnings

import pytest
from commands import ROOT, execute, imported_by
from dask_cluster import certificates, cluster
from distributed.versions import VersionMismatchWarning
from faults import until
from kills import newest
from lasting import OURS, assert_same_end

from experiments.cli.errors import BadRequest
from experiments.launch.cluster import connection
from experiments.launch.cluster.seating import choose
from experiments.launch.cluster.workers import Expected, Seat, objection
from experiments.launch.supervised import located
from experiments.training.config import parse

RUN = "--task tiny_tasks:drawing --workers 4 --steps 12 --eval-every 6 "
RUN += "--checkpoint-every 4"


def seats(**hosts):
    """Workers by address: seats(a=2) are a0 and a1 on host a."""
    return {
        f"{host}{i}": Seat(f"{host}{i}", (host,), 1, {}, {}, False, "", True, 0)
        for host, count in hosts.items()
        for i in range(count)
    }


def chosen(free, count, before=()):
    found = choose(free, count, before)
    return found and [seat.address for seat in found]


def test_processes_lie_evenly_over_hosts_and_neighbours_together():
    assert chosen(seats(a=3, b=3), 4) == ["a0", "a1", "b0", "b1"]
    assert chosen(seats(a=1, b=3), 4) == ["a0", "b0", "b1", "b2"]
    assert chosen(seats(a=2, b=2, c=2), 3) == ["a0", "b0", "c0"]
    assert chosen(seats(a=2), 3) is None


def test_processes_stay_on_their_workers_or_hosts():
    free = seats(a=3, b=3, c=1)
    before = [free["a0"], free["a1"], free["b0"], free["b1"]]
    assert chosen(free, 4, before) == ["a0", "a1", "b0", "b1"]
    del free["a1"], free["b0"]
    assert chosen(free, 4, before) == ["a0", "a2", "b2", "b1"]
    del free["a2"]
    assert chosen(free, 4, before) == ["a0", "c0", "b2", "b1"]


def test_paths_are_those_that_the_command_means():
    config = parse(["--out", "x", "--export", "x.safetensors", "--data-dir", "/data"])
    found = located(config, {"out": "/home/x", "folder": "/home"})
    paths = (found.out, found.export, found.data_dir)
    assert [str(x) for x in paths] == ["/home/x", "/home/x.safetensors", "/data"]
    assert located(parse([]), {"out": "runs/1"}).data_dir is None


def test_runs_without_a_scheduler_do_not_import_dask():
    names = imported_by("import experiments.run, experiments.launch.supervised")
    assert not {"dask", "distributed"} & names


def test_scheduler_that_is_not_there_is_code_4(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as sock:
        address = f"tcp://127.0.0.1:{sock.getsockname()[1]}"
    words = f"--processes 2 --scheduler {address} --init-timeout 2"
    ended = execute(words, tmp_path / "out")
    assert ended.code == 4
    [line] = ended.stderr.splitlines()
    assert line.startswith(f"error: --scheduler {address}: no answer: ")


def test_address_of_another_form_is_code_2(tmp_path):
    ended = execute("--processes 2 --scheduler nowhere.json", tmp_path / "out")
    assert ended.code == 2
    assert "error: --scheduler must be tcp://HOST:PORT" in ended.stderr
    assert not ended.out.exists()


def test_scheduler_of_other_versions_is_told_in_one_line(monkeypatch, capfd):
    async def knock(address, seconds):
        assert (address, seconds) == ("tcp://a:1", 3.0)

    def client(address, **given):
        warnings.warn(VersionMismatchWarning("a\ntable"), stacklevel=2)
        raise ImportError("the scheduler speaks\nanother protocol")

    monkeypatch.setattr(connection, "_knock", knock)
    monkeypatch.setattr("distributed.Client", client)
    line = "--scheduler tcp://a:1: the scheduler speaks another protocol"
    with pytest.raises(BadRequest, match=line):
        connection.connect("tcp://a:1", 3.0)
    assert capfd.readouterr().err == ""


@pytest.mark.long
@pytest.mark.parametrize(
    "count, workers, nanny", [(1, 1, False), (2, 3, False), (2, 2, True)]
)
def test_run_on_a_cluster_is_the_run_on_one_machine(count, workers, nanny, tmp_path):
    words = f"{RUN} --processes {count}"
    environ = {"JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": OURS}
    alone = execute(words, tmp_path / "alone", **environ)
    with cluster(tmp_path) as dask:
        for _ in range(workers):
            dask.worker(nanny=nanny)
        ended = dask.run(words).ended()
        assert_same_end(ended, alone)
        assert ended.summary["processes"] == count
        # The summary is process 0's, and the command shows it.
        shown = ended.stdout.replace(str(ended.out), str(alone.out)).splitlines()
        assert [x for x in shown if not varies(x)] == [
            x for x in alone.stdout.splitlines() if not varies(x)
        ]
        assert not [*ended.out.parent.glob(".syncalgos-*")]


def varies(line):
    """Whether a line of the summary has times."""
    return line.split()[:1] in (["speed"], ["time"])


@pytest.mark.long
def test_users_own_module_may_lie_in_the_folder_of_worker_and_command(tmp_path):
    project = tmp_path / "project"
    project.mkdir()
    shutil.copy(ROOT / "tests" / "support" / "tiny_tasks.py", project / "mine.py")
    prefix = ["env", "-C", str(project), f"PYTHONPATH=.:{ROOT}:{OURS}"]
    with cluster(tmp_path, workers=2, prefix=prefix) as dask:
        words = RUN.replace("tiny_tasks", "mine")
        ended = dask.run(f"{words} --processes 2").ended()
    assert ended.code == 0, ended.stderr


CODE = {"experiments": "0", "mine": "3"}
HAS_2 = "but this command has 2"


@pytest.mark.parametrize(
    "changes, line",
    [
        ({}, None),
        ({"is_stale": True}, "its code in /there has changed since it started"),
        ({"versions": {"python": "3", "jax": "1"}}, f"it has jax 1, {HAS_2}"),
        ({"versions": {"python": "3", "jax": ""}}, f"it has no jax, {HAS_2}"),
        (
            {"code": CODE | {"experiments": None}},
            "it cannot import experiments: start it by `python",
        ),
        (
            {"code": CODE | {"experiments": "1"}},
            "its copy of experiments in /there differs from this command's copy",
        ),
        ({"code": CODE | {"mine": None}}, "it cannot import mine: start it by"),
        (
            {"code": CODE | {"mine": "4"}},
            "its copy of mine differs from this command's copy",
        ),
    ],
)
def test_workers_must_share_code_versions_and_modules(changes, line):
    versions = {"python": "3", "jax": "2"}
    seat = Seat("a", ("b",), 1, versions, CODE, False, "/there", True, 0)
    found = objection(seat._replace(**changes), Expected(versions, CODE))
    assert found == line or (line and found is not None and found.startswith(line))


@pytest.mark.long
def test_workers_that_differ_are_refused_by_name(tmp_path):
    other = tmp_path / "other"
    for name in ("syncalgos", "experiments"):
        shutil.copytree(ROOT / name, other / name)
    (other / "syncalgos" / "keys.py").write_text("changed = True\n")
    older = tmp_path / "older"
    older.mkdir()
    (older / "numpy-0.1.dist-info").mkdir()
    (older / "numpy-0.1.dist-info" / "METADATA").write_text("Name: numpy\nVersion: 0.1")
    with cluster(tmp_path, workers=1) as dask:
        dask.worker(prefix=["env", "-C", str(other)], PYTHONPATH=OURS)
        dask.worker(prefix=["env", "-C", str(older)], PYTHONPATH=OURS)
        command = dask.run(f"{RUN} --processes 2")
        command.wait_for("waiting for Dask workers: 1 of 2 missing")
        dask.worker()
        ended = command.ended()
    assert ended.code == 0
    refused = [x for x in ended.stderr.splitlines() if " is refused: " in x]
    host = socket.gethostname()
    for pid, reason in [
        (dask.workers[1].pid, f"its copy of syncalgos in {other} differs from "),
        (dask.workers[2].pid, "it has numpy 0.1, but this command has "),
    ]:
        [line] = [x for x in refused if f"(pid {pid} on {host})" in x]
        assert reason in line
    assert len(refused) == 2


def strange_words(host, port):
    """Speaks TLS without a certificate; raises an OSError when it is turned away."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection((host, port)) as sock,
        context.wrap_socket(sock) as wrapped,
    ):
        wrapped.sendall(b"x" * 100)
        if not wrapped.recv(1):
            raise ConnectionResetError


@pytest.mark.long
def test_tls_keeps_strangers_out(tmp_path):
    environ = certificates(tmp_path)
    with cluster(tmp_path, 2, flags=["--protocol", "tls"], **environ) as dask:
        assert dask.address.startswith("tls://")
        steps = "--steps 1000000 --eval-every 1000000 --checkpoint-every 4"
        command = dask.run(f"{RUN} --processes 2 {steps} --keep-checkpoints 1")
        until(lambda: newest(command.run_out) >= 4, "step 4")
        at = dask.address.removeprefix("tls://")
        for address, code in [(dask.address, 2), (f"tcp://{at}", 4)]:
            words = f"{RUN} --processes 2 --scheduler {address} --init-timeout 3"
            stranger = execute(words, tmp_path / "stranger", PYTHONPATH=OURS)
            assert stranger.code == code, stranger.stderr
            assert len(stranger.stderr.splitlines()) == 1
        host, _, port = at.rpartition(":")
        with socket.create_connection((host, int(port))) as sock:
            sock.sendall(b"x" * 100)
        with pytest.raises(OSError):
            strange_words(host, int(port))
        step = newest(command.run_out)
        until(lambda: newest(command.run_out) > step, "it goes on")
        command.kill(signal.SIGTERM)
        assert command.ended().code == 75
