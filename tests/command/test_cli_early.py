"""Requests that the command line answers by itself, before jax is imported."""

import inspect
import re

import pytest
from support.command_answers import answered

import syncalgos
from experiments.aim.config import SETTINGS as OF_AIM
from experiments.command import factories
from experiments.command.factories import ALGORITHM, TASK, describe_factory
from experiments.command.settings import MOST_CHOICES
from experiments.study import config
from experiments.training.config import SETTINGS
from experiments.training.optimizers import AT_SYNC
from syncalgos import checks
from syncalgos._engine.placement.make_layout import AUTO, BACKENDS

KINDS = (ALGORITHM, TASK)
EARLY_COMMANDS = {  # all in one process, where nothing slow may be imported
    **{f"{name} --version": None for name in ("run", "compare", "aim")},
    "run --list": None,
    "run --help": SETTINGS,
    "run --help-all": SETTINGS,
    "compare -h": config.SETTINGS,
    "compare --help-all": config.SETTINGS,
    "aim --help": OF_AIM,
}
for kind in KINDS:
    for name in kind.files:
        EARLY_COMMANDS[f"run --{kind.flag} {name} --help"] = None


@pytest.fixture(scope="module")
def output_by_command():
    """Returns what each command prints, by command."""
    answers = answered(EARLY_COMMANDS)
    assert {(code, err, *slow) for code, _, err, slow in answers} == {(0, "")}
    return {
        command: out
        for command, (_, out, *_) in zip(EARLY_COMMANDS, answers, strict=True)
    }


def test_version_and_list_are_shown_without_jax(output_by_command):
    for name in ("run", "compare", "aim"):
        assert (
            output_by_command[f"{name} --version"]
            == f"syncalgos {syncalgos.__version__}\n"
        )
    listed = [x.split(maxsplit=1) for x in output_by_command["run --list"].splitlines()]
    for kind in KINDS:
        for name in kind.files:
            assert [name, describe_factory(kind, name).summary] in listed


def test_help_of_all_has_every_flag_with_what_it_can_be(output_by_command):
    for name in (*ALGORITHM.files, *TASK.files):
        assert re.search(rf"\b{name}\b", output_by_command["run --help"])
    for command in ("run --help-all", "compare --help-all", "aim --help"):
        for setting in EARLY_COMMANDS[command].values():
            word = f" {setting.placeholder}" if setting.read else ""
            assert f"\n  --{setting.name}{word}" in output_by_command[command]
            place = (
                word
                if len(setting.choices) <= MOST_CHOICES
                else output_by_command[command]
            )
            assert all(choice in place for choice in setting.choices)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.noun)
def test_help_of_a_factory_explains_its_parameters(kind, output_by_command):
    """With the text of the docstring, and the default."""
    for name in kind.files:
        help_text = output_by_command[f"run --{kind.flag} {name} --help"]
        factory = factories.find_function(kind, name)
        parameters = inspect.signature(factory).parameters
        doc = inspect.getdoc(factory) or ""
        assert doc.partition("\n")[0] in help_text
        for parameter in parameters.keys() - kind.passed:
            text = re.search(rf"\n    {parameter}: (.*(\n     .*)*)", doc)
            assert text, f"the docstring does not explain {parameter}"
            flag = (factories.SPELLED.get(parameter) or parameter).replace("_", "-")
            line = re.search(rf"\n  --{flag}[ ,](.*(\n   .*)*)", help_text)
            assert line, f"no flag --{flag}"
            assert " ".join(text[1].split()) in " ".join(line[1].split())
            default = parameters[parameter].default
            has_default = f"(default: {default})".lower() in line[1]
            assert has_default == (default not in (inspect.Parameter.empty, ""))
            # What happens then is said, and in one place.
            words = " ".join(text[1].split())
            assert default is not None or re.search("[Nn]one means", words), words
        assert "--axis" not in help_text and "--learning-rate" not in help_text
        assert "--data-dir" not in help_text  # it is a common flag


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.noun)
def test_flags_read_from_source_are_those_of_the_factory(kind):
    def describe_flags(factory):
        return factory.doc, {
            name: (p.default, factories.flag_kind(p).get("metavar"))
            for name, p in factory.flags.items()
        }

    for name in kind.files:
        function = factories.find_function(kind, name)
        read = describe_factory(kind, name)
        imported = factories.of_function(kind, name, function)
        assert describe_flags(read) == describe_flags(imported)


def test_no_factory_may_have_a_parameter_named_as_a_flag():
    parser_flags = {"help", "help_all", "version"}
    assert {*factories.RESERVED.split()} == parser_flags | {*SETTINGS} | {
        *config.SETTINGS
    }


def test_choices_of_flags_are_those_of_the_library():
    assert [*SETTINGS["backend"].choices] == [AUTO, *BACKENDS]
    assert [*SETTINGS["opt_state_at_sync"].choices] == [*AT_SYNC]


@pytest.mark.parametrize(
    ("written", "names", "meant"),
    [
        ("BMUF", ["bmuf", "diloco"], "bmuf"),
        ("cifar", ["cifar10", "mnist"], "cifar10"),
        ("--foo", ["--out", "--workers"], None),  # alike by their dashes alone
        ("list", ["list", "tuple"], None),
    ],
)
def test_a_suggestion_is_near_and_never_what_was_written(written, names, meant):
    expected = "" if meant is None else f"; did you mean {meant!r}?"
    assert checks.nearest(written, names) == expected
