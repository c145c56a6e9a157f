"""One command at a time writes to a folder."""

import errno
import fcntl
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.commands import PROGRAM, ROOT, TIMEOUT, environment
from support.faults import commands, until
from support.resumed_runs import files, run

from experiments import one_run
from experiments import run as command_line
from experiments.checkpoint import lock
from experiments.checkpoint.resume import FOLDER
from experiments.checkpoint.shards import find_steps
from experiments.command.errors import BadRequest
from experiments.study.main import main as compare_main

TINY = (
    "--task support.tiny_tasks:drawing --workers 2 --algo bmuf "
    "--period 4 --eval-every 4"
)
LONG = f"{TINY} --steps 40000 --checkpoint-every 4 --eval-every 40000"
STUDY = "--task support.tiny_tasks:drawing --workers 2 --steps 4 --algos bmuf --seeds 1"


def assert_refused(stderr, out, pid):
    [line] = stderr.splitlines()
    message = f"error: --out {out}: another command writes there (pid {pid} on "
    assert line.removeprefix("process 0: ").startswith(message)
    assert line.endswith("): wait until it ends, or use another folder")


@pytest.mark.slow
def test_processes_hold_a_folder_over_a_restart_and_to_the_end(tmp_path):
    out = tmp_path / "out"
    with commands(tmp_path) as start:
        command = start(f"{LONG} --processes 2 --max-restarts 1")
        until(lambda: find_steps(out / FOLDER), "a checkpoint")
        refused = start(f"{LONG} --processes 2 --resume").ended()
        assert (refused.code, refused.stdout) == (2, "")
        assert_refused(refused.stderr, out, command.member(0))
        os.kill(command.member(0), signal.SIGKILL)
        command.wait_for("restart 1 of 1")
        command.wait_for("resuming from the checkpoint of step")
        command.kill(signal.SIGTERM)
        assert command.ended().code == 75
    assert not (out / lock.NAME).exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("main", "words"),
    [(command_line.main, f"{TINY} --steps 4 --resume"), (compare_main, STUDY)],
)
def test_command_is_refused_before_it_touches_anything(main, words, tmp_path, capsys):
    out = tmp_path / "out"
    with lock.lock_folder(out):
        (out / "study.json").write_text("{}")
        old_files = files(out)
        assert main([*shlex.split(words), "--out", str(out)]) == 2
        assert_refused(capsys.readouterr().err, out, os.getpid())
        assert files(out) == old_files


@pytest.mark.slow
def test_run_that_another_command_has_made_meanwhile_is_not_replaced(
    tmp_path, monkeypatch
):
    out = tmp_path / "out"
    make_run = one_run.make_run

    def make_slowly(*arguments, **options):
        made_run = make_run(*arguments, **options)
        out.mkdir()
        (out / "summary.json").write_text("{}")
        return made_run

    monkeypatch.setattr(one_run, "make_run", make_slowly)
    ended = run(f"{TINY} --steps 4", out)
    assert ended.code == 2
    assert ended.stderr.startswith(f"error: --out {out} already holds a run (summary.")
    assert files(out) == {"summary.json": b"{}"}


def test_nothing_is_left_of_what_was_refused(tmp_path):
    with pytest.raises(BadRequest), lock.lock_folder(tmp_path / "a" / "b"):
        raise BadRequest("no")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir], ids=["FIFO", "folder"])
def test_lock_that_is_no_file_is_refused(make, tmp_path):
    make(tmp_path / lock.NAME)
    with pytest.raises(BadRequest) as refused, lock.lock_folder(tmp_path):
        pass
    line = f"{tmp_path / '.lock'} is not a file: remove it, or use another folder"
    assert str(refused.value) == line


@pytest.mark.long
def test_two_commands_of_one_second_have_folders_of_their_own(tmp_path):
    words = [*PROGRAM, "--steps", "16", "--processes", "2"]
    environ = environment(PYTHONPATH=ROOT, JAX_NUM_CPU_DEVICES=1)
    time.sleep(1 - time.time() % 1)  # a second begins
    processes = [subprocess.Popen(words, cwd=tmp_path, env=environ) for _ in range(2)]
    assert [process.wait(TIMEOUT) for process in processes] == [0, 0]
    assert len(list(tmp_path.glob("runs/*/summary.json"))) == 2


def test_folder_without_locks_is_used_with_a_line(tmp_path, monkeypatch, capsys):
    def flock(descriptor, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with lock.lock_folder(tmp_path):
        line = capsys.readouterr().err
    why = os.strerror(errno.ENOLCK)
    assert line.startswith(f"--out {tmp_path} cannot be locked ({why}): ")


CONTENDER = """
import os, sys
from pathlib import Path
from experiments.command.errors import BadRequest
from experiments.checkpoint.lock import lock_folder

out, times = Path(sys.argv[1]), 0
while times < 50:
    try:
        with lock_folder(out):
            os.close(os.open(out / "mine", os.O_CREAT | os.O_EXCL))
            os.unlink(out / "mine")
            times += 1
    except BadRequest as error:
        assert "another command writes there" in str(error), error
"""


def test_no_two_hold_a_folder_however_they_come_and_go(tmp_path):
    (tmp_path / "kept").touch()
    command = [sys.executable, "-c", CONTENDER, str(tmp_path)]
    contenders = [subprocess.Popen(command, cwd=ROOT) for _ in range(4)]
    try:
        assert [x.wait(TIMEOUT) for x in contenders] == [0] * 4
    finally:
        for contender in contenders:
            contender.kill()
            contender.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
