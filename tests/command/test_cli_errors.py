"""Bad requests, folders and strategies of the user's own."""

import errno
import os
import shlex
import sys

import jax
import pytest
from support.command_answers import MODULES, answered, assert_told, write_modules
from support.commands import BASE, ROOT, SUMMARY, run_program
from support.resumed_runs import run

from experiments import files
from experiments.command.errors import BadRequest, explaining_errors, in_one_line
from experiments.processes import join
from experiments.run import main


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Lets this process import modules of the user's own."""
    monkeypatch.syspath_prepend(write_modules(tmp_path))
    yield
    for name in MODULES:
        sys.modules.pop(name, None)


def test_module_that_is_here_is_named_with_its_factories(monkeypatch, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(MODULES["mine"])
    monkeypatch.chdir(tmp_path)
    assert main(["--algo", "mine"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "mine.py is here: use --algo mine:FACTORY (its functions: pull, " in line


def test_the_package_names_its_commands():
    ended = run_program([sys.executable, "-m", "experiments"])
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "syncalgos" in ended.stdout.splitlines()[0]  # others have experiments, too
    for name in ("run", "compare", "aim"):
        assert f"python -m experiments.{name} " in ended.stdout


def test_strategy_of_the_users_own_runs_over_an_earlier_runs_files_alone(
    modules, tmp_path
):
    out = tmp_path / "out"
    out.mkdir()
    for name in ("config.json", "metrics.jsonl", "summary.json", "notes.txt"):
        (out / name).write_text("earlier\n")
    words = "--algo mine:pull --strength 0.25 --period 8 --steps 16 --eval-every 16"
    ended = run(f"{words} --workers 2 --overwrite", out)
    assert ended.code == 0 and set(ended.summary) >= SUMMARY
    assert ended.summary["arguments"] == {"period": 8, "strength": 0.25}
    assert (ended.summary["algo"], ended.summary["syncs"]) == ("mine:pull", 2)
    assert ended.config["settings"]["steps"] == 16
    assert [line["step"] for line in ended.lines] == [16]
    assert (out / "notes.txt").read_text() == "earlier\n"


RUN = [sys.executable, "-m", "experiments.run"]
NO_WORDS = "import sys; del sys.argv; from experiments import run"
NO_WORDS += "; sys.exit(run.main(['--lr']))"
SHELLS = {  # what a shell may lack: the command, what is told
    "a folder": (RUN, "the working folder cannot be used: No such file or directory"),
    "letters": ([*RUN, "--algo", "bmüf"], "has letters that this locale lacks"),
    "words": ([sys.executable, "-c", NO_WORDS], "--lr: expected one argument"),
}


@pytest.mark.parametrize("lacks", SHELLS)
def test_what_a_shell_lacks_is_a_short_line(lacks, tmp_path):
    command, message = SHELLS[lacks]
    removed_folder = tmp_path / "gone"
    removed_folder.mkdir()
    environ = {"PYTHONPATH": str(ROOT)}
    if lacks == "letters":
        environ |= {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    if lacks == "a folder":
        command = ["sh", "-c", f"rmdir ../gone; exec {shlex.join(command)}"]
    ended = run_program(command, cwd=removed_folder, **environ)
    [line] = ended.stderr.splitlines()
    assert ended.returncode == 2 and message in line


def test_help_explains_the_parameters_of_the_users_own_strategy(modules, capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--algo", "mine:pull", "--help"])
    help_text = " ".join(capsys.readouterr().out.split())
    assert "Pulls replicas to their mean." in help_text
    assert "--period N steps between pulls. (default: 4)" in help_text
    assert "how far replicas go, where 1 is 100% of the way." in help_text


def test_a_folder_that_is_not_the_runs_is_refused_and_kept(tmp_path):
    words_by_command = {
        f"{BASE} --out run": ["run", "--overwrite"],
        "--lr nan --overwrite --out run": ["--lr"],
        f"{BASE} --out file": ["--out", "file is a file"],
        f"{BASE} --out file/a/b": ["--out", "file is a file"],
    }
    if sys.platform == "linux":
        words_by_command[f"{BASE} --out /proc/run"] = ["/proc/run"]
    old_files = tmp_path / "file", tmp_path / "run" / "config.json"
    old_files[1].parent.mkdir()
    for path in old_files:
        path.write_text("earlier")
    commands = [f"run {words}" for words in words_by_command]
    answers = answered(commands, tmp_path, PYTHONPATH=ROOT, JAX_LOG_COMPILES="1")
    for answer, words in zip(answers, words_by_command.values(), strict=True):
        assert_told(answer, words)
    assert {x for x in tmp_path.rglob("*") if x.is_file()} == {*old_files}
    assert all(path.read_text() == "earlier" for path in old_files)


class Odd(BaseException):
    """No Exception, and without a text."""

    def __str__(self):
        raise Odd


@pytest.mark.parametrize("error", [RuntimeError("x" * 10**7), Odd(), SystemExit(3)])
def test_any_error_of_a_users_own_is_a_short_line(error):
    with pytest.raises(BadRequest) as refused, explaining_errors("algo", "mine:odd"):
        raise error
    line = in_one_line(refused.value)
    assert line.startswith(f"--algo mine:odd: {type(error).__name__}: ")
    assert len(line) < 3000


def test_an_error_of_ones_own_is_no_lost_process():
    def fails(x):
        raise RuntimeError("server unavailable: gloo timed out")

    number = jax.ShapeDtypeStruct((), "float32")
    for call in (fails, jax.jit(lambda x: jax.pure_callback(fails, number, x))):
        with pytest.raises(RuntimeError) as raised:
            jax.block_until_ready(call(1.0))
        assert not join.tells_of_loss(raised.value)
    lost = jax.errors.JaxRuntimeError("UNKNOWN: Gloo all-reduce failed: timed out")
    assert join.tells_of_loss(lost)


def test_a_link_in_the_place_of_an_unfinished_file_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    path = tmp_path / "summary.json"
    victim.write_text("precious")
    for link in (path, path.with_name(".summary.json.tmp")):
        link.symlink_to(victim)
    files.write(path, "new")
    assert victim.read_text() == "precious" and path.read_text() == "new"
    assert not path.is_symlink() and len([*tmp_path.iterdir()]) == 2


@pytest.mark.parametrize(
    ("number", "code"),
    [(errno.ENOSPC, 75), (errno.EIO, 75), (errno.EACCES, 2), (errno.ENOTDIR, 2)],
)
def test_what_may_pass_has_another_exit_code_than_what_lasts(number, code, tmp_path):
    with (
        pytest.raises(BadRequest, match=r"^--out ") as refused,
        files.refuse_os_errors("--out", tmp_path),
    ):
        raise OSError(number, os.strerror(number))
    assert refused.value.code == code
