"""Bad requests, folders and strategies of the user's own, as real processes."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from commands import BASE, ROOT, SUMMARY, execute, two_at_a_time

from experiments.compare import main as compare
from experiments.run import main
from syncalgos import ALGORITHMS

MODULES = {
    "broken": "raise OSError('out of\\nluck')",
    "mine": '''
import jax
import syncalgos
from syncalgos import Strategy, collectives


def pull(period: int = 4, strength: float = 0.5) -> Strategy:
    """Pulls replicas to their mean.

    Args:
        period: steps between pulls.
        strength: how far replicas go,
            where 1 is 100% of the way.
    """

    def nearer(x, mean):
        return x + strength * (mean - x)

    def sync(replica, state, step):
        means = collectives.mean(replica.params)
        params = jax.tree.map(nearer, replica.params, means)
        return replica._replace(params=params), state

    return syncalgos.every(period, Strategy(sync=sync))


def number():
    return 3


def failing():
    raise RuntimeError("out of ideas")


def taken(workers=3):
    return Strategy()


def reshaping():
    def sync(replica, state, step):
        wider = jax.tree.map(lambda x: x[None], replica.params)
        return replica._replace(params=wider), state

    return Strategy(sync=sync)


def branching():
    def sync(replica, state, step):
        return (replica, state) if step % 2 else (replica, ())

    return Strategy(sync=sync)


def narrowing():
    def sync(replica, state, step):
        half = jax.tree.map(lambda x: x.astype("bfloat16"), replica.params)
        return replica._replace(params=half), state

    return Strategy(sync=sync)
''',
}

# Flags, and what the line must name.
BAD = {
    "--algo bmfu": ["unknown algorithm 'bmfu'; did you mean 'bmuf'?; your own: pack"],
    "--algo xyz": ["'xyz'", *ALGORITHMS],
    "--algo 'bmuf --nesterov'": ["'bmuf --nesterov'", "leave the quotation marks out"],
    "--learning-rate 0.1": ["'--learning-rate': say --lr"],
    "--epochs=3": ["'--epochs': say --steps"],
    "--task digit": ["'digit'", "'digits'"],
    "--backend pmpa": ["'pmpa'", "'pmap'", "shard_map", "vmap"],
    "--optimizer adm": ["unknown optimizer 'adm'; did you mean 'adam'?"],
    "--optimizer schedule_free_sgd": ["evaluates another", "adamw", "--schedule"],
    "--schedule cosin": ["'cosin'", "'cosine'", "constant", "step"],
    "--perido 4": ["'--perido'", "'--period'"],
    "--stepps 4": ["'--stepps'", "'--steps'"],
    "stray": ["'stray'"],
    "--period 0": ["period", "at least 1", "got 0"],
    "--period -1": ["period", "at least 1", "got -1"],
    "--period 1.5": ["--period", "whole number", "'1.5'"],
    "--period abc": ["--period", "whole number", "'abc'"],
    "--block-momentum 1.0": ["block_momentum", "below 1", "got 1.0"],
    "--block-momentum -0.1": ["block_momentum", "at least 0", "got -0.1"],
    "--block-momentum nan": ["block_momentum", "got nan"],
    "--workers 0": ["--workers", "at least 1", "got 0"],
    "--workers 128 --batch-size 64": ["batch of 64", "128 workers"],
    "--batch-size 100": ["batch of 100", "8 workers", "96 or 104"],
    "--batch-size 1600": ["batch of 1600", "1438 examples"],
    "--steps 0": ["--steps", "at least 1", "got 0"],
    "--lr nan": ["--lr", "above 0", "got nan"],
    "--lr inf": ["--lr", "finite", "got inf"],
    "--lr -1": ["--lr", "above 0", "got -1"],
    "--lr 0": ["--lr", "above 0", "got 0"],
    "--devices 7": ["device 7", "0, 1"],
    "--workers 7 --devices 0,1": ["7 workers", "2 devices"],
    "--devices 0,0": ["distinct", "[0, 0]"],
    "--devices 0,x": ["--devices", "'0,x'"],
    "--seed -1": ["--seed", "at least 0", "got -1"],
    "--optimizer adam --momentum 0.9": ["adam", "--momentum", "sgd"],
    "--warmup-steps 40 --steps 32": ["--warmup-steps 40", "--steps 32"],
    "--algo absent:pull": ["'absent'"],
    "--algo mine:absent": ["'mine'", "'absent'"],
    "--algo broken:pull": ["'broken'", "OSError: out of luck"],
    "--algo mine:number": ["mine:number", "Strategy", "got 3"],
    "--algo mine:failing": ["RuntimeError: out of ideas (mine.py:", " in failing)"],
    "--algo mine:pul": ["'pul'", "'pull'"],
    "--algo mine.py:pull": ["mine:pull, without .py"],
    "--period 99999999999": ["period", "below 2**31"],
    "--optimizer sm3 --schedule cosine": ["sm3", "schedule"],
    "--algo mine:taken": ["mine:taken", "'workers'"],
    "--algo diloco --reduce int3": ["'int3'", "'int8'", "int4", "int2", "bf16"],
    "--algo gossip --topology rin": ["'rin'", "'ring'", "exponential"],
    "--algo streaming_diloco --fragments 3": ["fragments", "period 16", "got 3"],
    "--algo streaming_diloco --delay 4": ["delay", "below", "= 4", "got 4"],
    "--opt-state-at-sync rest": ["'rest'", "'reset'", "keep", "average"],
    "--algo sync_sgd --opt-state-at-sync reset": ["never syncs"],
    "--ema 1": ["--ema", "below 1", "got 1"],
}


def owners(parameter):
    """The algorithms that have it."""
    return [
        name
        for name, factory in ALGORITHMS.items()
        if parameter in inspect.signature(factory).parameters
    ]


BAD |= {
    "--algo sync_sgd --period 4": ["sync_sgd", "--period", *owners("period")],
    "--algo sync_sgd --no-nesterov": ["--no-nesterov", *owners("nesterov")],
    "--outer-lr 1": ["bmuf has no", "--outer-lr", *owners("outer_lr")],
}


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    folder = tmp_path_factory.mktemp("modules")
    for name, source in MODULES.items():
        (folder / f"{name}.py").write_text(source)
    return folder


@pytest.fixture(scope="module")
def run(request, tmp_path_factory, modules):
    folder = tmp_path_factory.mktemp("runs")
    # jax then writes a line for each compilation to stderr, where one line may be.
    watched = {"PYTHONPATH": modules, "JAX_LOG_COMPILES": "1"}
    with two_at_a_time(request, folder, **watched) as run:
        yield run


def assert_refused(ended, *named):
    assert ended.code == 2
    assert ended.stdout == ""
    # JAX_LOG_COMPILES logs traces too, and an optimizer is tried out on shapes alone.
    lines = [
        x for x in ended.stderr.splitlines() if not x.startswith("Finished tracing")
    ]
    assert len(lines) == 1, lines[:3]
    for text in named:
        assert text in lines[0]


@pytest.mark.sample(6, slow=12)
@pytest.mark.parametrize("command, named", BAD.items(), ids=BAD)
def test_bad_request_is_refused_in_one_line_before_any_compilation(run, command, named):
    ended = run(command)
    assert_refused(ended, *named)
    assert not ended.out.exists()


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "factory, change",
    [("reshaping", "float32[1,"), ("narrowing", "bfloat16[")],
)
def test_strategy_that_changes_params_is_refused_by_leaf(
    factory, change, modules, tmp_path
):
    out = tmp_path / "out"
    ended = execute(f"--algo mine:{factory}", out, PYTHONPATH=modules)
    assert_refused(ended, f"mine:{factory}", "replica.params[0]['b']", change)
    assert not out.exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--algos bmuf diloco", "'diloco': say --algos 'bmuf, diloco'"),
        ("bmuf diloco", "'bmuf': say --algos 'bmuf, diloco'"),
        ("--learning-rate 1", "'--learning-rate' is a flag of none of sync_sgd, "),
        ("--learning-rate 1", ": say --lr"),
        ("--networks 1Gbps", "'--networks' is a flag of none of "),
    ],
)
def test_study_is_refused_in_one_line(words, told, capsys, tmp_path):
    assert compare([*words.split(), "--out", str(tmp_path / "out")]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert told in line


def test_module_that_is_here_is_named_with_its_factories(monkeypatch, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(MODULES["mine"])
    monkeypatch.chdir(tmp_path)
    assert main(["--algo", "mine"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "mine.py is here: say --algo mine:FACTORY; its functions are pull, " in line


def test_the_package_names_its_commands():
    shown = subprocess.run(
        [sys.executable, "-m", "experiments"], cwd=ROOT, capture_output=True, text=True
    )
    assert (shown.returncode, shown.stderr) == (0, "")
    for name in ("run", "compare", "aim"):
        assert f"python -m experiments.{name} " in shown.stdout


@pytest.mark.slow
def test_groups_that_do_not_divide_the_workers_are_refused(tmp_path):
    ended = execute("--algo hierarchical --groups 3", tmp_path / "out")
    assert_refused(ended, "8 workers", "3 groups")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_form_that_the_strategy_cannot_take_is_refused_in_a_line(tmp_path):
    ended = execute(f"{BASE} --algo bmuf --lane-form merged", tmp_path / "out")
    assert ended.code == 2
    told = "error: --lane-form: lanes cannot run merged: the strategy does not take "
    assert ended.stderr.splitlines()[-1] == f"{told}the mean of all gradients"


@pytest.mark.slow
def test_strategy_that_raises_is_refused_with_its_place(modules, tmp_path):
    lines = MODULES["mine"].splitlines()
    line = 1 + next(i for i, text in enumerate(lines) if "if step % 2" in text)
    ended = execute("--algo mine:branching", tmp_path / "out", PYTHONPATH=modules)
    assert_refused(ended, f"mine.py:{line}: `", "use every(schedule, …)")


def test_strategy_of_the_users_own_runs_with_its_parameters_as_flags(modules, tmp_path):
    own = "--algo mine:pull --strength 0.25 --period 8 --steps 16 --eval-every 8"
    ended = execute(own, tmp_path / "out", PYTHONPATH=modules)
    assert ended.code == 0
    assert ended.summary["arguments"] == {"period": 8, "strength": 0.25}
    assert ended.summary["syncs"] == 2
    assert ended.summary["algo"] == "mine:pull"


def test_help_explains_the_parameters_of_the_users_own_strategy(modules, tmp_path):
    shown = execute("--algo mine:pull --help", tmp_path, PYTHONPATH=modules)
    assert (shown.code, shown.stderr) == (0, "")
    assert "Pulls replicas to their mean." in shown.stdout
    assert "--period" in shown.stdout and "steps between pulls." in shown.stdout
    assert "how far replicas go, where 1 is 100% of the way." in shown.stdout


def test_folder_that_holds_a_run_is_refused_and_kept(tmp_path):
    (tmp_path / "config.json").write_text("earlier")
    assert_refused(execute(BASE, tmp_path), str(tmp_path), "--overwrite")
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    assert (tmp_path / "config.json").read_text() == "earlier"


@pytest.mark.slow
def test_overwrite_replaces_the_runs_files_alone(tmp_path):
    for name in ("config.json", "metrics.jsonl", "summary.json", "notes.txt"):
        (tmp_path / name).write_text("earlier\n")
    ended = execute("--steps 16 --eval-every 16 --overwrite", tmp_path)
    assert ended.code == 0
    assert set(ended.summary) >= SUMMARY
    assert ended.config["settings"]["steps"] == 16
    assert [line["step"] for line in ended.lines] == [16]
    assert (tmp_path / "notes.txt").read_text() == "earlier\n"


def test_bad_request_overwrites_nothing(tmp_path):
    (tmp_path / "summary.json").write_text("earlier")
    assert_refused(execute("--lr nan --overwrite", tmp_path), "--lr")
    assert (tmp_path / "summary.json").read_text() == "earlier"


@pytest.mark.sample(1)
@pytest.mark.parametrize("below", [".", "folder", "folder/deeper"])
def test_out_at_or_under_a_file_is_refused(below, tmp_path):
    (tmp_path / "file").write_text("kept")
    ended = execute(BASE, tmp_path / "file" / below, JAX_LOG_COMPILES="1")
    assert_refused(ended, "--out", f"{tmp_path / 'file'} is a file")
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_out_in_an_unwritable_place_is_refused_before_any_compilation():
    ended = execute(BASE, Path("/proc/run"), JAX_LOG_COMPILES="1")
    assert_refused(ended, "/proc/run")
