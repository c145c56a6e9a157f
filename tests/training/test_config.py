"""The config of a run: a field is a flag, recorded and compared by existing."""

import dataclasses
import json
import re
from pathlib import Path, PurePosixPath

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import files
from experiments.checkpoint.resume import check_config, check_settings
from experiments.command.errors import BadRequest
from experiments.command.words import number, read_whole_number
from experiments.one_run import Folder
from experiments.training import trackers
from experiments.training.config import SETTINGS, RunConfig, parse
from experiments.training.prepare import prepare

OTHER = {"algo": "sync_sgd", "task": "mnist", "optimizer": "adam", "partition": "label"}
OTHER |= {
    "batch_size": "16",
    "devices": "1,0",
    "mesh": "fsdp=2",
    "coordinator": "host:1234",
    "resume": "",
    "steps": "64",
    "track": "tensorboard",
}


def other_word(name):
    """A word for a flag that is not its default; "" for a switch."""
    setting = SETTINGS[name]
    if name in OTHER or setting.read is None:
        return OTHER.get(name, "")
    if setting.choices:
        return next(x for x in setting.choices if x != setting.default)
    if setting.read is Path:
        return "elsewhere.safetensors"
    return {read_whole_number: "4", number: "0.5"}[setting.read]


def parsed(name):
    """The config of a command line of one flag, which is not at its default."""
    word = other_word(name)
    return parse([f"--{SETTINGS[name].name}", *([word] if word else [])])


@pytest.fixture(scope="module")
def run():
    """A run as its files know it."""
    return prepare(parse(["--steps", "8"]))


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("out", "runs/x", Path("runs/x")),
        ("export", PurePosixPath("a.safetensors"), Path("a.safetensors")),
        ("lr", np.float32(0.5), 0.5),
        ("lr", jnp.float32(0.5), 0.5),
        ("steps", np.int64(4), 4),
        ("resume", np.bool_(True), True),
        ("devices", np.arange(2), (0, 1)),
        ("devices", 1, (1,)),
        ("mesh", {"fsdp": np.int64(2)}, {"fsdp": 2}),
        ("track", "tensorboard", ("tensorboard",)),
        ("arguments", {"period": np.int64(3)}, {"period": 3}),
        ("task_arguments", {"file": Path("a.csv")}, {"file": "a.csv"}),
    ],
)
def test_a_value_of_python_is_that_of_the_flag(name, value, meant):
    field_value = getattr(RunConfig(**{name: value}), name)
    assert field_value == meant
    json.dumps(files.to_json_value(field_value))  # which no number of NumPy is for


@pytest.mark.parametrize(
    ("name", "value"),
    [("out", 3), ("resume", "no"), ("partition", 3), ("devices", "0,1"), ("lr", "0.1")],
)
def test_a_value_of_another_type_is_refused_in_a_line(name, value):
    with pytest.raises(ValueError, match=f"^--{name} must be .*, got "):
        RunConfig(**{name: value})


def test_every_field_is_a_setting_or_holds_a_factorys_flags():
    fields = [x.name for x in dataclasses.fields(RunConfig)]
    assert fields == [*SETTINGS, "arguments", "task_arguments"]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_field_is_a_flag(name):
    config = parsed(name)
    default = parse([])
    assert getattr(config, name) != getattr(default, name)
    other_settings = [x for x in SETTINGS if x != name]
    assert all(getattr(config, x) == getattr(default, x) for x in other_settings)
    # Processes must agree on it, unless each may have its own.
    agreed = config.values("run", "start")
    assert (name in agreed) == (SETTINGS[name].scope != "process")


@pytest.fixture
def written(run, tmp_path):
    """The content of the run's config.json, once it is there."""
    Folder(run, tmp_path, 0.0).record(["command"])
    return json.loads((tmp_path / "config.json").read_text())


def test_every_field_is_in_config_json_in_its_order(written):
    assert [*written["settings"]] == [*SETTINGS]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_field_is_compared_on_resume_unless_each_start_may_have_another(
    name, run, written, tmp_path
):
    written["settings"][name] = "another"
    files.write_json(tmp_path / "config.json", written)
    if SETTINGS[name].scope != "run" or name == "steps":
        check_config(tmp_path, run.config)  # its rate is constant: it may be longer
        return
    with pytest.raises(
        BadRequest, match=f"was made with --{SETTINGS[name].name} another"
    ):
        check_config(tmp_path, run.config)


def test_a_run_whose_numbers_depend_on_its_length_stays_so_long(run, tmp_path):
    config = dataclasses.replace(run.config, schedule="cosine")
    shorter = run._replace(plan=run.plan._replace(config=config))
    Folder(shorter, tmp_path, 0.0).record(["command"])
    check_config(tmp_path, shorter.config)
    with pytest.raises(BadRequest, match="was made with --steps 8, not 12"):
        check_config(tmp_path, dataclasses.replace(shorter.config, steps=12))


def test_a_run_older_than_a_flag_had_its_default(run, written, tmp_path):
    newer = [x for x in SETTINGS if getattr(run.config, x) == SETTINGS[x].default]
    assert {"seed", "accumulate"} < {*newer}
    settings = {x: v for x, v in written["settings"].items() if x not in newer}
    older = {**written, "settings": settings, "arguments": {}, "task_arguments": {}}
    files.write_json(tmp_path / "config.json", older)
    check_config(tmp_path, run.config)


def test_a_run_of_an_earlier_version_goes_on_unless_its_numbers_differ(
    run, written, tmp_path
):
    del written["sha256"]  # 0.3 wrote none
    former_settings = {
        "scheduler": "tcp://host:8786",
        "sync_memory": "pinned_host",
        "ema": None,
    }
    former_settings |= {
        "feed": "device",
        "lanes": 4,
        "keep_checkpoints": 3,
        "sync_at_end": False,
    }
    settings = written["settings"] | former_settings
    (tmp_path / "config.json").write_text(json.dumps({**written, "settings": settings}))
    check_config(tmp_path, run.config)
    arguments = written["arguments"] | {"switch": 3}  # of 0.2
    former_record = {**written, "arguments": arguments}
    (tmp_path / "config.json").write_text(json.dumps(former_record))
    with pytest.raises(BadRequest, match="was made with --switch 3, not None"):
        check_config(tmp_path, run.config)


def test_a_config_cannot_be_changed_nor_have_impossible_fields():
    config = parse(["--steps", "8"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.steps = 9  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError):
        config.arguments["period"] = 9  # pyright: ignore[reportIndexIssue]
    with pytest.raises(ValueError, match="--workers must be"):
        dataclasses.replace(config, workers=0)


@pytest.mark.parametrize("word", trackers.INSTEAD)
def test_a_tracker_that_is_gone_is_answered_with_what_to_use_now(word):
    """From Python, too."""
    message = re.escape(f"unknown --track {word!r}: {trackers.INSTEAD[word]}")
    with pytest.raises(BadRequest, match=message):
        parse(["--track", word])
    with pytest.raises(ValueError, match=message):
        RunConfig(track=(word,))


def test_an_argument_may_have_the_name_of_its_parameter_or_of_its_flag():
    assert parse(["--algo", "fedopt", "--beta1", "0.5"]).arguments["beta1"] == 0.5
    for name in ("b1", "beta1"):
        config = RunConfig(algo="fedopt", arguments={name: 0.5})
        assert config.arguments == {"beta1": 0.5}


def test_an_argument_of_a_former_name_is_known_by_its_new_one():
    """In files of 0.3; other values are refused by the new flag."""
    config = parse(["--algo", "edit"])
    check_settings(
        {"algo": "edit", "clip": 10.0, "rate": 0.02}, config, has_same_workers=True
    )
    with pytest.raises(BadRequest, match=r"made with --leaf-clip 9\.0, not 10\.0"):
        check_settings({"algo": "edit", "clip": 9.0}, config, has_same_workers=True)
