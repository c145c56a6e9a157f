"""Runs on a Dask cluster over two hosts, which are two network namespaces.

A host's own folder is one that only its worker's mount namespace has.
"""

import os
import re
import shutil
import signal
import subprocess

import pytest
from dask_cluster import RUN, cluster, undisturbed
from faults import until
from kills import newest
from lasting import assert_same_end
from test_two_hosts import ADDRESSES, hosts, listening  # noqa: F401 - a fixture


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The same run on this machine, which nothing befalls."""
    return undisturbed(tmp_path_factory.mktemp("whole") / "out")


@pytest.mark.long
def test_run_goes_on_without_the_host_whose_link_is_down(hosts, whole, tmp_path):  # noqa: F811
    here, there = hosts
    with cluster(tmp_path, 2, host=ADDRESSES[0], prefix=here) as dask:
        away = dask.worker(prefix=there, host=ADDRESSES[1])
        until(lambda: "Registered to" in away.said, "it joins")
        command = dask.run(f"{RUN} --max-restarts 1")
        until(lambda: newest(command.run_out) >= 3, "step 3")
        assert dask.worker_of(dask.member(1)) is away
        for host, address in zip(hosts, ADDRESSES, strict=True):
            assert {*listening(host)} == {address}
        subprocess.run([*there, "ip", "link", "set", "wire", "down"], check=True)
        ended = command.ended()
        assert_same_end(ended, whole)
        line = r"process 1's host \S+ is gone \(its Dask worker tcp://10\.78\.0\.2:\d+ "
        line += "(left|gave no sign of life for 20 s)"
        assert re.search(line, ended.stderr)


def own_folder(folder):
    """A prefix for a worker that has a folder of its own in the place of another."""
    if os.geteuid() != 0 or not shutil.which("unshare"):
        pytest.skip("mount namespaces take root, and the program unshare")
    mounted = f'mount -t tmpfs own "{folder}" && exec "$@"'
    prefix = ["unshare", "-m", "sh", "-c", mounted, "sh"]
    tried = subprocess.run([*prefix, "true"], capture_output=True)
    if tried.returncode:
        pytest.skip(f"no mount namespaces: {tried.stderr!r}")
    return prefix


@pytest.mark.long
def test_process_comes_back_to_the_checkpoints_on_its_host(whole, tmp_path):
    folder = tmp_path / "own"
    folder.mkdir()
    prefix = own_folder(folder)
    with cluster(tmp_path) as dask:
        for _ in range(3):
            dask.worker(prefix=prefix)
        command = dask.run(f"{RUN} --max-restarts 1", folder / "out")
        first, second = (dask.worker_of(dask.member(i)).pid for i in (0, 1))
        saved = "out/checkpoints/step-00000003.1-of-2.npz"
        until(lambda: os.path.exists(f"/proc/{second}/root{folder}/{saved}"), "step 3")
        os.kill(dask.member(1), signal.SIGKILL)
        ended = command.ended()
        found = tmp_path / "found"
        shutil.copytree(f"/proc/{first}/root{folder}/out", found)
        assert not (folder / "out").exists()
    assert ended.code == 0
    assert "--out is not on a shared file system: files are in " in ended.stderr
    assert "restart 1 of 1" in ended.stderr
    found = ended._replace(out=found)
    assert found.summary["params_sha256"] == whole.summary["params_sha256"]
    assert found.summary["resumed_at"]
