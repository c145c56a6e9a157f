"""Studies from Python values are those of a command line, without its words."""

import shlex
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

import syncalgos
from experiments.command.errors import BadRequest
from experiments.study import config
from experiments.study.from_python import make_study
from experiments.training.config import RunConfig


class Call(NamedTuple):
    """A call of `compare`, and the command line of the same study."""

    algos: Any
    flags: dict[str, Any]
    command: str
    tune: Mapping[str, Any] = MappingProxyType({})


CALLS = {
    "names with flags, of 0.4": Call(
        "sync_sgd, bmuf --nesterov",
        {"task": "mnist1d", "lr": 0.1, "workers": 4},
        "--algos 'sync_sgd, bmuf --nesterov' --task mnist1d --lr 0.1 --workers 4",
    ),
    "labels and tuned flags, of 0.4": Call(
        {"SGD": "sync_sgd", "NBM": "bmuf --nesterov"},
        {"steps": 64, "tune_seeds": 2},
        "--algos 'SGD=sync_sgd, NBM=bmuf --nesterov' --steps 64 --tune-seeds 2 "
        "--tune lr=0.0125:1.6:log:8 --tune momentum=0.5,0.90",
        {"lr": "0.0125:1.6:log:8", "momentum": "0.5,0.90"},
    ),
    "a sweep and shared values of algorithms, of 0.4": Call(
        ["sync_sgd", "bmuf"],
        {"sweep": "workers=2,4", "worker-batch": 8, "period": 8, "nesterov": True},
        "--algos sync_sgd,bmuf --sweep workers=2,4 --worker-batch 8 --period 8 "
        "--nesterov",
    ),
    "the default study": Call("sync_sgd,model_averaging,bmuf", {}, ""),
    "a list of numbers": Call(
        ["bmuf"], {}, "--algos bmuf --tune lr=0.1,0.2", {"lr": [0.1, 0.2]}
    ),
    "a config": Call(
        [RunConfig(algo="bmuf", lr=0.1, arguments={"period": 4})],
        {"clip_norm": 1},
        "--algos 'bmuf --lr 0.1 --period 4' --clip-norm 1",
    ),
    "the values of papers": Call(
        ["diloco", RunConfig(algo="bmuf")],
        {"preset": "paper"},
        "--algos 'diloco, bmuf' --preset paper",
    ),
    "a published comparison": Call(
        ["bmuf", "sync_sgd"],
        {"preset": "unlike-data", "lr": 0.01},
        "--algos 'bmuf, sync_sgd' --preset unlike-data --lr 0.01",
    ),
    "no value for an algorithm's flag": Call(
        ["bmuf"], {"block_momentum": None}, "--algos bmuf --block-momentum None"
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_study_from_python_is_that_of_its_command_line(name):
    """Its folder goes on, and its runs are the same."""
    call = CALLS[name]
    study = make_study(call.algos, seeds=5, tune=call.tune, flags=call.flags)
    of_command = config.read_command_line(shlex.split(call.command))
    assert config.identity(study) == config.identity(of_command)
    assert study.points == of_command.points
    for variant, expected in zip(study.variants, of_command.variants, strict=True):
        assert variant.label == expected.label
        assert variant.parameters == expected.parameters
        assert variant.tuned == expected.tuned
        assert [*variant.decisive_trials()] == [*expected.decisive_trials()]


def test_numbers_are_read_in_the_type_of_their_parameter():
    """An int in place of a float would be compiled for each of its values."""
    study = make_study("bmuf", seeds=1, tune={}, flags={"lr": 1, "block_momentum": 0})
    run = study.variants[0].config
    assert isinstance(run.lr, float)
    assert isinstance(run.arguments["block_momentum"], float)


def test_a_factory_takes_shared_values_by_its_parameters():
    def average(period: int, weight: float = 0.5) -> syncalgos.Strategy:
        return syncalgos.bmuf(period, block_momentum=weight)

    flags = {"period": 4, "lr": 0.1}
    study = make_study(
        {"mine": average, "bmuf": "bmuf"}, seeds=1, tune={"weight": [0]}, flags=flags
    )
    mine, bmuf = study.variants
    assert mine.config.arguments == {"period": 4, "weight": 0.5}
    assert bmuf.config.arguments["period"] == 4
    assert [axis.flag for axis in mine.tuned] == ["weight"] and not bmuf.tuned
    with pytest.raises(BadRequest, match="are required: --period"):
        make_study([average], seeds=1, tune={}, flags={})


@pytest.mark.parametrize(
    ("algos", "flags", "tune", "message"),
    [
        ("bmuf", {"steps": 1.5}, {}, "--steps: must be a whole number, got '1.5'"),
        ("bmuf", {"steps": 0}, {}, "--steps must be"),
        ("bmuf", {"period": 4.5}, {}, "--period: must be a whole number, got '4.5'"),
        ("bmuf", {"lr": "much"}, {}, "--lr: must be a number, got 'much'"),
        ("bmuf", {"stpes": 4}, {}, "the flag '--stpes'; did you mean '--steps'?"),
        ("bmuf", {"outer_lr": 4}, {}, "the flag '--outer-lr': it belongs to"),
        ("bmuf", {"seed": 4}, {}, "--seed is for single runs: use --seeds"),
        ("bmuf", {"jobs": "many"}, {}, "--jobs: must be a whole number, got 'many'"),
        ("bmuf", {"baseline": "diloco"}, {}, "unknown --baseline 'diloco'"),
        ("bmuf", {"lr": 0.1}, {"lr": [0.1, 1]}, "--lr is given, and also swept"),
        ("bmuf", {}, {"lr": [0.1, 0.1]}, "--tune lr: values must differ"),
        ("bmuf", {}, {"lr": "0.1:1"}, "--tune 'lr=0.1:1'"),
        ("bmuf", {"tune": "lr=1,2"}, {"lr": [1, 2]}, "use one of them"),
        ("bmuf", {}, {"lr": 0.1}, "--tune lr: needs a text or a list"),
        (
            [RunConfig(algo="bmuf", arguments={"perod": 4})],
            {},
            {},
            "the flag '--perod'; did you mean '--period'?",
        ),
        ([RunConfig(algo="bmuf", out="here")], {}, {}, "--out is for single runs"),
        (["bmuf, diloco"], {}, {}, "has several algorithms"),
    ],
)
def test_a_value_that_cannot_be_is_refused_in_a_line(algos, flags, tune, message):
    with pytest.raises(BadRequest) as refused:
        make_study(algos, seeds=1, tune=tune, flags=flags)
    assert message in str(refused.value) and "\n" not in str(refused.value)
