"""Requests that the command line answers by itself, before jax is imported."""

import json
import subprocess
import sys

import pytest
from commands import ROOT, TIMEOUT, environment

import syncalgos
from experiments.aiming.config import SETTINGS as OF_AIM
from experiments.cli import factories
from experiments.cli.factories import ALGORITHM, TASK, describe
from experiments.cli.words import number, whole
from experiments.study import config
from experiments.study.config import SCALES
from experiments.training.config import SETTINGS
from experiments.training.optimizers import AT_SYNC
from syncalgos import checks
from syncalgos.engine.lanes.selection import FORMS
from syncalgos.engine.placement.make_layout import AUTO, BACKENDS

RUN, COMPARE, AIM = (f"experiments.{name}" for name in ("run", "compare", "aim"))

# Answers commands one after the other in a process that has not imported jax.
ANSWER = """
import contextlib, importlib, io, json, shlex, sys
answers = []
for module, command in json.load(sys.stdin):
    main = importlib.import_module(module).main
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(shlex.split(command))
        except SystemExit as exit:
            code = exit.code
    answers.append([code, out.getvalue(), err.getvalue(), "jax" in sys.modules])
print(json.dumps(answers))
"""


def answered(asked):
    """The exit code, stdout and stderr of each of (module, command), without jax."""
    ended = subprocess.run(
        [sys.executable, "-c", ANSWER],
        cwd=ROOT,
        env=environment(),
        input=json.dumps(asked),
        capture_output=True,
        encoding="utf-8",
        timeout=TIMEOUT,
    )
    assert ended.returncode == 0, ended.stderr
    answers = json.loads(ended.stdout)
    for (_, command), (*_, imported) in zip(asked, answers, strict=True):
        assert not imported, command
    return [answer[:3] for answer in answers]


# Numbers to which nothing sets an upper end: a run diverges, or a model says so.
ENDLESS = {"lr", "weight-decay", "clip-norm", "target", "step-time", "timeout"}


def impossible(setting):
    """Words that a setting refuses, as its row in the table says."""
    if setting.choices:
        return ["nonsense"]
    if setting.read is whole:
        most = setting.below or 2**31
        return [str(setting.least - 1), "1.5", str(most), str(2**31), str(10**30)]
    bounds = [setting.above, setting.below]
    if setting.least is not None:
        bounds.append(setting.least - 1)
    found = [str(x) for x in bounds if x is not None]
    if setting.name not in ENDLESS:
        found.append("1e300")
    return [*found, "nan", "inf", "-inf", "much"] if setting.read is number else []


RANGES = [
    (module, f"--{setting.name}={word}", [f"--{setting.name}"])
    for module, table in ((RUN, SETTINGS), (COMPARE, config.SETTINGS), (AIM, OF_AIM))
    for setting in table.values()
    for word in impossible(setting)
]
EMPTY = [
    (module, f"--{flag}{between}''", [f"--{flag} ''", "empty", "unset variable"])
    for module, flags in (
        (RUN, ("algo", "task", "out", "steps", "period", "data-dir", "model")),
        (COMPARE, ("algos", "task", "out", "measure", "network", "tune", "lr")),
    )
    for flag in flags
    for between in (" ", "=")
]
BOTH = "one algorithm", "experiments.compare --algos bmuf,diloco"
OF_RUN = {
    "--algo BMUF": ["did you mean 'bmuf'"],
    "--algo bmuf,diloco": BOTH,
    "--task digits,mnist": ["one task", "'digits,mnist'"],
    "--perido 4": ["did you mean '--period'"],
    "--Steps 4": ["did you mean '--steps'"],
    "--outer-lr 1": ["bmuf has no flag --outer-lr", "diloco"],
    "--task mnist --context 3": ["mnist has no flag --context", "shakespeare"],
    "--period x": ["--period", "whole number", "'x'"],
    "--algo gossip --topology rin": ["'rin'", "'ring'", "exponential"],
    "--algo sparseloco --bits 3": ["--bits", "'3'", "8, 4, 2, none"],
    "--task mnist --batch-norm local": ["--batch-norm", "'local'", "worker, global"],
    "--batch-size 100": ["batch of 100", "96 or 104"],
    "--batch-size 64 --accumulate 3": ["3 microbatches", "48 or 72"],
    "--steps 32 --warmup-steps 40": ["--warmup-steps 40", "--steps 32"],
    "--steps 32 --sync-until 32": ["--sync-until 32", "--steps 32", "sync_sgd"],
    "--partition dirichlet:0": ["--partition", "above 0"],
    "--devices 0,x": ["--devices", "'0,x'"],
    "--resume --overwrite": ["--resume", "--overwrite"],
    "--resume": ["--resume", "--out"],
    "--resume-center --steps 8": ["--resume", "--out"],
    "--max-restarts 3": ["--max-restarts", "--processes", "--scheduler", "--resume"],
    "--processes 3": ["8 workers", "3 processes"],
    "--processes 2 --backend vmap": ["--backend vmap", "2 processes"],
    "--coordinator a:99": ["--coordinator", "--process-id"],
    "--process-id 1": ["--process-id", "--coordinator"],
    "stray": ["'stray'"],
}
OF_COMPARE = {
    "--algos bmfu": ["'bmfu'", "'bmuf'"],
    "--algos A=bmuf,A=diloco": ["'A'", "twice", "other=bmuf"],
    '''--algos "'bmuf"''': ["quotation mark"],
    "--algos 'bmuf --perod 8'": ["'--perod'", "'--period'"],
    "--algos 'bmuf --period \"\"'": ["--period ''", "empty"],
    "--tune foo=1,2": ["'--foo'", "none of"],
    "--tune lr=-1,1": ["--lr", "above 0", "-1"],
    "--tune lr=0.1:1:log:100000": ["100,000 values", "at most 10,000 runs"],
    "--tune lr=0.1:1:log:5000": ["15,015 runs", "10,000"],
    "--tune lr=0.1:1:log:999 --tune block-lr=0.1:1:log:999": ["runs", "10,000"],
    "--seeds 5000": ["15,024 runs", "10,000"],
    "--sweep workers=1,0": ["--workers", "at least 1"],
    "--lr fast": ["--lr", "'fast'"],
    "--baseline nope": ["--baseline", "'nope'"],
    "--network 10gb": ["'10gb'", "'10gbe'"],
    "--preset slowmo-tabel": ["'slowmo-tabel'", "'slowmo-table'"],
    "--algos sync_sgd --period 8": ["none of sync_sgd", "bmuf"],
}
REFUSED = [*RANGES, *EMPTY]
REFUSED += [(RUN, command, named) for command, named in OF_RUN.items()]
REFUSED += [(COMPARE, command, named) for command, named in OF_COMPARE.items()]
NAMES = [f"{module.partition('.')[2]} {command}" for module, command, _ in REFUSED]


@pytest.fixture(scope="module")
def refused():
    """The answers to all bad requests, by (module, command)."""
    asked = [case[:2] for case in REFUSED]
    return dict(zip(asked, answered(asked), strict=True))


@pytest.mark.parametrize(("module", "command", "named"), REFUSED, ids=NAMES)
def test_bad_request_is_refused_in_a_line_before_jax_is_imported(
    module, command, named, refused
):
    code, out, err = refused[module, command]
    assert (code, out) == (2, "")
    [line] = err.splitlines()
    assert line.startswith("error: ")
    for text in named:
        assert text in line


def test_version_and_list_are_shown_without_jax():
    asked = [(RUN, "--version"), (COMPARE, "--version"), (RUN, "--list")]
    run, compare, listed = answered(asked)
    assert run == compare == [0, f"syncalgos {syncalgos.__version__}\n", ""]
    code, out, _ = listed
    assert code == 0
    for kind in (ALGORITHM, TASK):
        for name in kind.files:
            summary = describe(kind, name).summary
            assert any(x.split(maxsplit=1) == [name, summary] for x in out.splitlines())


def test_help_has_every_flag_in_a_group_with_what_it_can_be():
    [(code, out, _), (_, of_compare, _)] = answered([(RUN, "--help"), (COMPARE, "-h")])
    assert code == 0
    titles = ("training:", "workers:", "data:", "files:", "processes:")
    assert [x for x in out.splitlines() if x in titles] == [*titles]
    for shown, table in ((out, SETTINGS), (of_compare, config.SETTINGS)):
        for setting in table.values():
            word = f" {setting.shown}" if setting.read else ""
            assert f"\n  --{setting.name}{word}" in shown
            for choice in setting.choices:
                assert choice in word


def test_help_of_an_algorithm_and_a_task_needs_no_jax():
    [(code, out, _)] = answered([(RUN, "--algo diloco --task embeddings --help")])
    assert code == 0
    for flag in ("--outer-lr X", "--negatives N", "{replicated,shared,sharded}"):
        assert flag in out


@pytest.mark.parametrize("kind", [ALGORITHM, TASK], ids=lambda kind: kind.noun)
def test_flags_read_from_source_are_those_of_the_factory(kind):
    def told(factory):
        return factory.doc, {
            name: (p.default, factories.flag_kind(p).get("metavar"))
            for name, p in factory.flags.items()
        }

    for name in kind.files:
        function = factories.named(kind, name)
        read, asked = describe(kind, name), factories.of_function(kind, name, function)
        assert told(read) == told(asked)


def test_choices_of_flags_are_those_of_the_library():
    known = {
        "backend": (AUTO, *BACKENDS),
        "lane_form": FORMS,
        "opt_state_at_sync": [*AT_SYNC],
    }
    for name, choices in known.items():
        assert [*SETTINGS[name].choices] == [*choices]
    assert config.SETTINGS["scale_lr"].choices == (*SCALES,)


@pytest.mark.parametrize(
    ("written", "names", "meant"),
    [
        ("bmfu", ["bmuf", "diloco"], "bmuf"),
        ("BMUF", ["bmuf", "diloco"], "bmuf"),
        ("cifar", ["cifar10", "mnist"], "cifar10"),
        ("imagenet", ["imagenet_synthetic", "mnist"], "imagenet_synthetic"),
        ("--batch", ["--batch-size", "--steps"], "--batch-size"),
        ("--foo", ["--out", "--workers"], None),  # alike by their dashes alone
        ("--gpu", ["--out", "--opt-state-at-sync"], None),
        ("list", ["list", "tuple"], None),
    ],
)
def test_a_suggestion_is_near_and_never_what_was_written(written, names, meant):
    expected = "" if meant is None else f"; did you mean {meant!r}?"
    assert checks.nearest(written, names) == expected
