"""Requests that cannot be met: each is answered in one line, and leaves nothing.

A new row is a command and what its line must name. `EARLY` is answered before jax is
imported, `LATER` before anything is compiled.
"""

import inspect
import os

import pytest
from support.command_answers import MODULES, answered, assert_told, write_modules
from support.commands import ROOT

from experiments.aim.config import SETTINGS as OF_AIM
from experiments.command import factories
from experiments.command.factories import ALGORITHM, TASK
from experiments.command.words import (
    INSTEAD,
    REFUSED_FLAGS,
    number,
    parameter,
    read_whole_number,
)
from experiments.study.config import SETTINGS as OF_COMPARE
from experiments.tasks import TASKS
from experiments.training.config import SETTINGS
from syncalgos import ALGORITHMS

# Numbers to which nothing sets an upper end: a run diverges, or a model says so.
ENDLESS = {"lr", "weight-decay", "clip-norm", "target", "step-time", "timeout"}


def impossible(setting):
    """Words that a setting refuses, as its row in the table says."""
    if setting.choices:
        return ["nonsense"]
    if setting.read is read_whole_number:
        limit = setting.below or 2**31
        return [str(setting.least - 1), "1.5", str(limit), str(2**31), str(10**30)]
    bounds = [setting.above, setting.below]
    if setting.least is not None:
        bounds.append(setting.least - 1)
    words = [str(x) for x in bounds if x is not None]
    if setting.name not in ENDLESS:
        words.append("1e300")
    return [*words, "nan", "inf", "-inf", "much"] if setting.read is number else []


def make_impossible_values(command, settings):
    """Commands that set a flag to what it refuses, and the words of their errors."""
    words_by_command = {}
    for setting in settings.values():
        for word in impossible(setting):
            words_by_command[f"{command} --{setting.name}={word}"] = [
                f"--{setting.name}"
            ]
    return words_by_command


def make_empty_values(command, flags):
    """Commands that set a flag to an empty text, and the words of their errors."""
    words_by_command = {}
    for flag in flags.split():
        words = [f"--{flag} ''", "empty", "unset variable"]
        words_by_command[f"{command} --{flag} ''"] = words
        words_by_command[f"{command} --{flag}=''"] = words
    return words_by_command


RANGES = {
    **make_impossible_values("run", SETTINGS),
    **make_impossible_values("compare", OF_COMPARE),
    **make_impossible_values("aim", OF_AIM),
}
EMPTY = {
    **make_empty_values("run", "algo task out steps period partition data-dir model"),
    **make_empty_values("compare", "algos task out measure network tune lr"),
}


def owners(kind, parameter):
    """The algorithms, or tasks, that have it."""
    factory_by_name = {name: factories.find_function(kind, name) for name in kind.files}
    return [
        x
        for x in factory_by_name
        if parameter in inspect.signature(factory_by_name[x]).parameters
    ]


ONE_ALGORITHM = "one algorithm", "experiments.compare --algos bmuf,diloco"
NAMELESS = ["every algorithm needs a name"]
NO_RANGE = ["--tune", "needs a flag and its values"]
RANGE = ["--tune", "LOW:HIGH:log:COUNT"]
KINDS = ["unknown --partition", "iid", "speaker", "dirichlet:0.1"]
# Flags of other programs, where the command does not have them.
FOREIGN = {
    f"run {flag} 4": [f"unknown flag '{flag}': {advice}"]
    for flag, advice in INSTEAD.items()
    if parameter(flag) not in SETTINGS
}
# Flags that a study sets itself, in the words of one of its algorithms.
OF_STUDIES = {
    f"compare --algos 'bmuf --{flag.replace('_', '-')} 3'": [flag.replace("_", "-")]
    for flag in REFUSED_FLAGS
}
EARLY = RANGES | EMPTY | FOREIGN | OF_STUDIES
EARLY |= {
    # Names.
    "run --algo bmfu": ["unknown algorithm 'bmfu'; did you mean 'bmuf'? (for your own"],
    "run --algo BMUF": ["did you mean 'bmuf'"],
    "run --algo local_sgd": ["'local_sgd': use 'model_averaging' (for your own"],
    "run --algo xyz": ["'xyz'", *ALGORITHMS],
    "run --algo bmuf,diloco": ONE_ALGORITHM,
    "run --algo 'bmuf --nesterov'": ["'bmuf --nesterov'", "leave out the quotation"],
    "run --algo absent:pull": ["'absent'"],
    "run --algo broken:pull": ["'broken'", "OSError: out of luck"],
    "run --algo mine.py:pull": ["mine:pull, without .py"],
    "run --task what": ["'what'", *TASKS],
    "run --task data.CSV": ["is a file", "use --task table --file data.CSV"],
    "run --task digits,mnist": ["one task", "'digits,mnist': start a command"],
    "run --opt-state-at-sync rest": ["'rest'", "'reset'", "keep", "average"],
    # Flags, and whose they are.
    "run stray": ["'stray'"],
    "run --epochs=3": ["'--epochs': use --steps"],
    "run --perido 4": ["'--perido'", "did you mean '--period'"],
    "run --algo sync_sgd --period 4": ["sync_sgd has no", *owners(ALGORITHM, "period")],
    "run --algo sync_sgd --no-nesterov": ["--no-n", *owners(ALGORITHM, "nesterov")],
    "run --outer-lr 1": ["bmuf has no flag --out", *owners(ALGORITHM, "outer_lr")],
    "run --task shakespeare --batch-norm global": owners(TASK, "batch_norm"),
    # An algorithm's and a task's own values.
    "run --period 1.5": ["--period", "whole number", "'1.5'"],
    "run --algo gossip --topology rin": ["'rin'", "'ring'", "exponential"],
    "run --algo sparseloco --bits 3": ["--bits", "'3'", "8, 4, 2, none"],
    "run --task mnist --model lent": ["--model", "'lent'", "lenet, resnet20, mlp"],
    "run --task embeddings --algo bmuf --reduce row_sparse": ["bmuf", "--reduce"],
    # Numbers, and what does not fit together.
    "run --devices 0,x": ["--devices", "'0,x'"],
    "run --workers 128 --batch-size 64": ["batch of 64", "128 workers"],
    "run --batch-size 100": ["batch of 100", "8 workers", "96 or 104"],
    "run --batch-size 64 --accumulate 3": ["8 examples", "3 microbatches", "48 or 72"],
    "run --steps 32 --warmup-steps 40": ["--warmup-steps 40", "--steps 32"],
    "run --steps 32 --sync-until 32": ["--sync-until 32", "--steps 32", "sync_sgd"],
    "run --partition dirichlet": ["ALPHA must be", "above 0", "got ''"],
    "run --partition dirichlet:0": ["--partition", "above 0", "got 0"],
    "run --partition dirichlet:1e300": ["below 1e+09"],
    "run --partition dirchlet:0.1": [*KINDS, "did you mean 'dirichlet'"],
    "run --partition iid:3": ["unknown --partition 'iid:3'", "did you mean 'iid'"],
    "run --track wandbb": ["--track 'wandbb'", "did you mean 'wandb'", "tensorboard"],
    "run --keep best": ["--keep best", "--export or --checkpoint-every"],
    "run --resume --overwrite": ["--resume", "--overwrite"],
    "run --resume-center --overwrite": ["--resume", "--overwrite"],
    "run --resume": ["--resume", "--out"],
    "run --resume-center --steps 8": ["--resume", "--out"],
    "run --processes 3": ["8 workers", "3 processes"],
    "run --processes 2 --backend vmap": ["--backend vmap", "2 processes"],
    # The algorithms of a study.
    "compare --algos bmfu": ["'bmfu'", "did you mean 'bmuf'"],
    "compare --algos bmuf,": NAMELESS,
    "compare --algos '--period 4'": NAMELESS,
    "compare --algos =bmuf": ["'=bmuf' must be a label, = and a name"],
    "compare --algos 'A= bmuf'": ["'A=' must be a label, = and a name"],
    "compare --algos A=bmuf,A=diloco": ["'A'", "twice", "other=bmuf"],
    '''compare --algos "'bmuf"''': ["open quotation mark"],
    "compare --algos bmuf diloco": ["'diloco': use --algos 'bmuf, diloco'"],
    "compare bmuf diloco": ["'bmuf': use --algos 'bmuf, diloco'"],
    "compare --algos bmuf stray": ["unexpected argument 'stray'"],
    # Flags of its runs.
    "compare --task=digit": ["digit", "did you mean 'digits'"],
    "compare --lrr 0.1": ["'--lrr'", "'--lr'"],
    "compare --learning-rate 1": ["none of sync_sgd, ", ": use --lr"],
    "compare --algos 'dgc --warmup 4'": ["'--warmup'", "did you mean '--warmup-steps'"],
    "compare --algos dgc --tune step_size=1,2": ["'--step-size'"],
    "compare --networks 1Gbps": ["has the flag '--networks'"],
    "compare --algos 'bmuf --perod 8'": ["'--perod'", "'--period'"],
    "compare --algos 'bmuf --period \"\"'": ["--period ''", "empty"],
    "compare --algos sync_sgd --period 8": ["none of sync_sgd", "belongs to", "bmuf"],
    "compare --algos 'bmuf,sync_sgd --period 4'": ["sync_sgd has no flag --period"],
    "compare --seed 3": ["--seed", "--seeds"],
    "compare --export x": ["--export", "single runs"],
    "compare --lr fast": ["--lr", "must be a number", "'fast'"],
    "compare --baseline nope": ["--baseline", "'nope'", "sync_sgd"],
    "compare --preset larg-batch": ["did you mean 'large-batch'"],
    "compare --lr 1 --seeds 7000": ["21,000 runs", "20,000"],
    "compare --seeds 1001": ["--seeds must be at most 1000 with --tune"],
    # What it varies.
    "compare --tune lr": [*NO_RANGE, "lr=0.01:1:log:7", "'lr'"],
    "compare --tune lr=": NO_RANGE,
    "compare --tune =1,2": NO_RANGE,
    "compare --tune lr=1,,2": ["--tune", "not be empty"],
    "compare --tune lr=1:2": RANGE,
    "compare --tune lr=1:2:cubic:3": ["--tune", "LOW:HIGH:linear:COUNT"],
    "compare --tune lr=1:2:log:x": RANGE,
    "compare --tune lr=a:2:log:3": RANGE,
    "compare --tune lr=1:1:linear:3": ["--tune", "1 must be below 1"],
    "compare --tune lr=0:inf:linear:3": ["--tune", "must be below inf"],
    "compare --tune lr=0:1:log:3": ["--tune", "begins above 0"],
    "compare --tune lr=0.1:1:log:1": ["--tune", "at least 2 values, got 1"],
    "compare --tune lr=-1,1": ["--lr", "above 0", "-1"],
    "compare --tune optimizer=sgd,adam": ["needs numbers", "'sgd'"],
    "compare --tune lr=0.1:1:log:100000": ["100,000 values", "at most 20,000 runs"],
    "compare --tune lr=0.1:1:log:7000": ["21,015 runs", "20,000"],
    "compare --tune lr=1,2 --tune lr=3,4": ["lr", "once only"],
    "compare --tune lr=1,2 --sweep lr=3,4": ["lr", "once only"],
    "compare --lr=0.1 --tune=lr=1,2": ["--lr is given"],  # in vain
    "compare --algos='bmuf, A=bmuf --lr 3' --tune=lr=1,2": ["--lr is given"],
    "compare --sweep seed=1,2": ["seed", "--seeds"],
    "compare --sweep perid=1,2": ["'--perid'", "did you mean '--period'"],
    "compare --sweep workers=1,0": ["--workers", "at least 1"],
    "compare --algos bmuf --sweep='block_momentum|period=1,2'": ["varies one flag"],
    "compare --algos bmuf --tune='block_momentum=0,0.5|period=1'": ["same number of"],
    "compare --algos bmuf --tune='period=1,2|block_lr=0.1:1:log:2'": ["needs lists"],
    "compare --algos bmuf --tune='block_momentum=0,0.5|period'": ["needs a flag and"],
    "compare --algos bmuf --tune='block_momentum|=0.5,0.9'": NO_RANGE,
    "compare --algos bmuf --tune='block_momentum|rnk=0.5'": ["has the flag '--rnk'"],
    "compare --algos bmuf --tune='lr|block_momentum=1,2' --lr=1": ["--lr is given"],
    "compare --netwrok 10gbe": ["'--netwrok'", "'--network'"],
    "compare --lr": ["--lr"],
    "compare --worker-batch 8 --batch-size 64": ["--worker-batch", "--batch-size"],
    "compare --worker-batch 8 --sweep batch-size=8,16": ["--worker-batch", "batch"],
    "compare --worker-batch 8 --tune workers=2,4": ["--worker-batch", "--workers"],
    "compare --worker-batch 8 --algos 'bmuf --workers=2'": ["one --workers for all"],
    "compare --tune lr=0.1,0.2 --validation 0.1": ["--validation"],
    "compare --tune lr=0.1,0.10": ["lr=0.1,0.10"],
    # Machines, and what is compiled for them.
    "aim": ["--target is missing", "tpu:v5e"],
    "aim --target tpu:v55e:4x4": ["did you mean 'tpu:v5e'?"],
    "aim --target h100:4x8": ["did you mean 'cuda:h100'?"],
    "aim --target quantum": ["tpu:v4, tpu:v5e, tpu:v5p, tpu:v6e", "a100, cuda:h100, c"],
    "aim --target cpu:8,": ["cpu, cpu:8"],
    "aim --target tpu:v5e": ["such as tpu:v5e:4x4"],
    "aim --target tpu:v5e:0x4": ["such as tpu:v5e:4x4"],
    "aim --target tpu:v5p:4x4": ["takes 3 numbers, such as 4x4x4"],
    "aim --target tpu:v5e:3x4": ["must be even"],
    "aim --target tpu:v5e:32x16": ["at most 256 chips, got 512; see --slices"],
    "aim --target cuda:h100:2x16": ["at most 8 GPUs, got 16"],
    "aim --target cpu:0": ["cpu:N"],
    "aim --target tpu:v5e:4x4 --slices 0": ["--slices", "whole number of at least 1"],
    "aim --target cuda:h100:4x8 --slices 2": ["only TPUs have slices"],
    "aim --target cpu:8 --mesh fsdp=3": ["workers of 3 chips", "8 chips of cpu:8"],
    "aim --target cpu:8 --batch-size 12": ["12 does not divide over 8 workers"],
    "aim --target cpu:8 --backend pmap": ["only shard_map"],
    "aim --target cpu:8 --workers 12": ["--workers 12", "8 chips"],
    "aim --target cpu:8 --devices 0,1": ["--devices", "--target"],
    "aim --target cpu:8 --out here": ["--out", "--json or --page"],
    "aim --target cpu:8 --page found.html": ["must end in .md"],
    "aim --target cpu:8 --json nowhere/a.json": ["there is no folder nowhere"],
    "aim --target cpu:8 --processes 2": ["--processes", "--target"],
    "aim --target cpu:8 --algo bmuf": ["--algo", "use --algos"],
    "aim --target cpu:8 --network fast": ["network 'fast'", "10gbe"],
}
LINE = 1 + MODULES["mine"].partition("if step % 2")[0].count("\n")
OUT_OF_IDEAS = "RuntimeError: out of ideas (mine.py:", " in failing)"
POST_LOCAL = "run --algo post_local_sgd --steps 20"
ROW_SPARSE = "run --task embeddings --algo sync_sgd --reduce row_sparse"
TRIED_ON_A_MODEL = {  # on a model, which has to be drawn
    "run --algo mine:reshaping": ["mine:reshaping", "params[0]['b']", "float32[1,"],
    "run --algo mine:narrowing": ["mine:narrowing", "params[0]['b']", "bfloat16["],
    "run --algo mine:branching": [f"mine.py:{LINE}: `", "use every(…, schedule)"],
}
LATER = {
    **TRIED_ON_A_MODEL,
    # A strategy or a task that is none, and where it failed.
    "run --algo mine:absent": ["'mine'", "'absent'"],
    "run --algo mine:number": ["mine:number", "Strategy", "got 3"],
    "run --algo mine:taken": ["mine:taken", "'workers'"],
    "run --algo mine:denied": ["mine:denied", "'no_fast'"],
    "run --algo mine:aimed": ["mine:aimed", "'target'"],
    "run --task mine:aimed": ["--task mine:aimed", "'target'"],
    "compare --algos mine:labelled --sweep label=1,2": ["--label", "records"],
    "compare --algos mine:labelled --tune step=1,2": ["--step", "records"],
    "compare --algos mine:labelled --sweep drift=1,2": ["--drift", "records"],
    "run --algo mine:failing": OUT_OF_IDEAS,
    "run --task mine:failing": OUT_OF_IDEAS,
    "run --task mine:refusing --hidden 5": ["mine:refusing", "must be even, got 5"],
    "run --task mine:pul": ["'mine'", "'pul'", "'pull'"],
    "run --task mine:refusing --hiden 3": ["'--hiden'", "'--hidden'"],
    "run --task mine:refusing --model mlp": ["mine:refusing has no", "--m", "digits"],
    # Phases that a run does not hold: with the task's own steps, too.
    "run --task digits --sync-until 99999": ["99999 is not below --steps"],
    f"{POST_LOCAL} --dense-steps 20": ["--dense-steps 20 is not below --steps 20"],
    "run --schedule plateau --algo slowmo": ["needs each step's learning rate"],
    "run --schedule plateau": ["--schedule plateau: workers of bmuf share no loss"],
    "run --init-from absent.safetensors": ["absent.safetensors: there is no such file"],
    # An algorithm's own values.
    "run --algo sync_sgd --opt-state-at-sync reset": ["never syncs"],
    # Optimizers and devices.
    "run --optimizer adm": ["unknown optimizer 'adm'; did you mean 'adam'?"],
    "run --batch-size 1600": ["--batch-size 1600", "1438 examples"],
    # A task's own values.
    "run --task mnist --batch-norm global": ["--batch-norm", "'lenet'", "resnet20"],
    "run --task shakespeare --heads 3": ["--heads 3", "--width 128"],
    "run --task shakespeare --context 0": ["--context", "at least 1", "got 0"],
    "run --task spoken_digits --frames 100000": ["--frames", "at most", "got 100000"],
    "run --task embeddings --negatives -1": ["--negatives", "at least 0", "got -1"],
    "run --task embeddings --tables sharded --negatives 0": ["--negatives 0 needs"],
    "run --task embeddings --tables sharded --clip-norm 1": ["--clip-norm", "sharded"],
    f"{ROW_SPARSE} --task digits": ["row_sparse", "embeddings"],
    f"{ROW_SPARSE} --algo diloco": ["sync_sgd", "not diloco"],
    f"{ROW_SPARSE} --tables sharded": ["row_sparse", "replicated", "sharded"],
    "run --task imagenet_synthetic --image-size 31": ["--image-size", "least 32", "31"],
    "run --task imagenet_synthetic --classes 1001": ["--classes", "1000", "1001"],
    "run --task imagenet_synthetic --examples 8": ["--batch-size 16", "(8 examples)"],
    "run --task quadratic --noise=-1": ["--noise", "-1"],
    "run --task quadratic --condition 0.5": ["--condition", "0.5"],
    "run --task quadratic --dimensions 0": ["--dimensions", "0"],
    "compare --partition speaker": ["speaker", "label"],
}


def refused(commands, folder, **environ):
    """The answers to bad requests, by command.

    They come in an empty folder, which they leave empty, without data and network.
    """
    modules = folder / "modules"
    empty = folder / "empty"
    for folder_path in (modules, empty):
        folder_path.mkdir()
    path = os.pathsep.join(map(str, (ROOT, write_modules(modules))))
    nowhere = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    environ |= {"PYTHONPATH": path, "SYNCALGOS_DATA": folder / "none", **nowhere}
    answers = answered(commands, empty, **environ)
    assert not [*empty.iterdir()]
    return dict(zip(commands, answers, strict=True))


@pytest.fixture(scope="module")
def early(tmp_path_factory):
    return refused(EARLY, tmp_path_factory.mktemp("early"))


@pytest.fixture(scope="module")
def later(tmp_path_factory):
    # jax then writes a line for each compilation, where one line may be.
    return refused(LATER, tmp_path_factory.mktemp("later"), JAX_LOG_COMPILES="1")


@pytest.mark.parametrize(("command", "expected_words"), EARLY.items(), ids=EARLY)
def test_bad_request_is_refused_in_a_line_before_jax_is_imported(
    command, expected_words, early
):
    assert_told(early[command], expected_words)
    assert early[command][-1] == []


@pytest.mark.parametrize(("command", "expected_words"), LATER.items(), ids=LATER)
def test_bad_request_is_refused_in_a_line_before_any_compilation(
    command, expected_words, later
):
    assert_told(later[command], expected_words, command in TRIED_ON_A_MODEL)
