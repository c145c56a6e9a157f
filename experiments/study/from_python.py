"""The config of a study from Python values: names, configs, objects and numbers.

A name such as "bmuf --period 8" is read as a command line is; everything else stays the
value that it is.
"""

import secrets
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from experiments.command import flags as run_flags
from experiments.command.errors import BadRequest, refusing
from experiments.command.factories import YOUR_OWN, Factory
from experiments.command.flags import PAPER
from experiments.command.settings import to_plain_value
from experiments.command.words import (
    Words,
    as_words,
    flag_groups,
    flag_name,
    parameter,
)
from experiments.study import config as study_config
from experiments.study import presets
from experiments.study.command_line import (
    ADDED,
    VariantWords,
    check_flags,
    choose_axes,
    complete_variant,
    find_readers,
    list_axis,
    parse_axis,
    read_algorithms,
    unknown_flag,
)
from experiments.study.config import SETTINGS, StudyConfig, StudyFlags
from experiments.study.variants import Axis, Variant, at, read_text
from experiments.tasks.task import Task
from experiments.training.config import SETTINGS as RUN_SETTINGS
from experiments.training.config import RunConfig
from experiments.training.objects import NO_OBJECTS, Objects
from syncalgos import Strategy
from syncalgos.checks import shown

Algorithm = str | RunConfig | Strategy | Callable[..., Strategy]
"""A name with flags, such as "bmuf --period 8", a config, a strategy or its factory."""
Algorithms = str | Sequence[Algorithm] | Mapping[str, Algorithm]
Values = str | Sequence[float]
"""The values to try of a flag: a text as for --tune, or numbers."""


def make_study(
    algos: Algorithms,
    *,
    seeds: int,
    tune: Mapping[str, Values],
    flags: Mapping[str, Any],
) -> StudyConfig:
    """Makes the config of a study; the arguments are those of `experiments.compare`.

    Raises:
        BadRequest: the request cannot be met; one line says why.
    """
    values = {
        parameter(flag_name(name)): to_plain_value(value)
        for name, value in flags.items()
    }
    values.setdefault("seeds", seeds)
    objects = NO_OBJECTS
    if "task" in values:
        objects, values["task"] = _take_task(values["task"])
    if tune and values.get("tune"):
        raise BadRequest("tune is given beside tune in flags: use one of them")
    tuned = [_make_axis(name, tried_values) for name, tried_values in tune.items()]
    values = _add_preset(values, tuned)
    shared = _take_shared(values)
    study_flags = _make_flags(algos, values, shared)
    if not tuned:
        tuned = [parse_axis("--tune", text) for text in study_flags.tuned_texts]
    swept = []
    if study_flags.sweep is not None:
        swept = [parse_axis("--sweep", study_flags.sweep)]

    variants = _make_variants(algos, study_flags, objects)
    check_flags(
        variants,
        shared_names=[*shared],
        axes=[*tuned, *swept],
        own_names=SETTINGS,
    )
    variants = [
        _complete(variant, study_flags.task, shared, tuned=tuned, swept=swept)
        for variant in variants
    ]
    # No study is continued with other objects.
    has_objects = any(variant.objects != NO_OBJECTS for variant in variants)
    study = StudyConfig(
        **vars(study_flags),
        variants=tuple(variants),
        swept=swept[0] if swept else None,
        tuned=tuple(tuned),
        token=secrets.token_hex(4) if has_objects else "",
    )
    study_config.check_study(study)
    return study


def _take_task(task: Any) -> tuple[Objects, str]:
    """Returns the objects of a task that has no name, and its name for a config.

    Raises:
        BadRequest: it is neither a name, nor a Task or its factory.
    """
    if isinstance(task, str):
        return NO_OBJECTS, task
    _check_object(task, Task)
    imported_name = _find_import(task)
    if imported_name:
        return NO_OBJECTS, imported_name
    return Objects(task=task), YOUR_OWN


def _make_axis(name: str, values: Values) -> Axis:
    """Makes a tuned axis of a text or of numbers.

    Raises:
        BadRequest: the values cannot be tried.
    """
    if isinstance(values, str):
        return parse_axis("--tune", f"{name}={values}")
    if not isinstance(values, Iterable):
        raise BadRequest(
            f"--tune {name}: needs a text or a list of numbers, got {shown(values)}"
        )
    texts = [str(to_plain_value(value)) for value in values]
    with refusing(f"--tune {name}"):
        return list_axis("--tune", parameter(flag_name(name)), texts)


def _add_preset(values: Mapping[str, Any], tuned: Sequence[Axis]) -> dict[str, Any]:
    """Returns the values of a study over those of its preset, if it has one."""
    preset = values.get("preset")
    if preset not in presets.NAMES:
        return {**values}
    names = {*values, "algos"}
    for axis in tuned:
        names |= {"tune", *axis.flags}
    for flag in ("tune", "sweep"):
        texts = values.get(flag) or ()
        for text in [texts] if isinstance(texts, str) else texts:
            names |= {*parse_axis(f"--{flag}", text).flags}
    return {**presets.under(preset, names), **values}


def _take_shared(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values that belong to the runs: those that are no study's."""
    shared: dict[str, Any] = {}
    if values.get("preset") == PAPER:
        shared["preset"] = PAPER
    for name, value in values.items():
        # None leaves a field of a run to its task; a flag of an algorithm may be None.
        is_left_out = value is None and name in RUN_SETTINGS
        if name not in SETTINGS and not is_left_out:
            shared[name] = value
    return shared


def _make_flags(
    algos: Algorithms, values: Mapping[str, Any], shared: Mapping[str, Any]
) -> StudyFlags:
    """Makes the flags of a study.

    Raises:
        BadRequest: a value is out of range.
    """
    own_values: dict[str, Any] = {}
    for name, value in values.items():
        setting = SETTINGS.get(name)
        if setting is None or value is None:
            continue
        is_text = isinstance(value, str) and not setting.is_repeated
        if is_text and setting.read is not None:
            value = read_text(name, setting.read, value)
        own_values[name] = value
    own_values["algos"] = algos if isinstance(algos, str) else ", ".join(_labels(algos))
    return run_flags.make_config(StudyFlags, own_values, {"shared": _record(shared)})


def _labels(algos: Sequence[Algorithm] | Mapping[str, Algorithm]) -> list[str]:
    """Returns the labels or names of algorithms."""
    if isinstance(algos, Mapping):
        return [*algos]
    return [x if isinstance(x, str) else type(x).__name__ for x in algos]


def _record(values: Mapping[str, Any]) -> tuple[Words, ...]:
    """Returns values by parameter as study.json has them, which names their flags."""
    return tuple(flag_groups(as_words(values)))


def _make_variants(
    algos: Algorithms, study_flags: StudyFlags, objects: Objects
) -> list[Variant]:
    """Makes the variants of a study, each with its own settings alone.

    Raises:
        BadRequest: one is neither a name, a config, a strategy nor a factory; or two
            have one label.
    """
    if isinstance(algos, str):
        return [
            _make_named(words, study_flags, objects) for words in read_algorithms(algos)
        ]
    pairs: list[tuple[str, Algorithm]] = []
    if isinstance(algos, Mapping):
        pairs += algos.items()
    else:
        pairs += [("", algorithm) for algorithm in algos]
    variants: dict[str, Variant] = {}
    for number, (label, algorithm) in enumerate(pairs, 1):
        if isinstance(algorithm, str):
            words = _read_one(algorithm)
            words = words._replace(label=label or words.label)
            variant = _make_named(words, study_flags, objects)
        elif isinstance(algorithm, RunConfig):
            variant = _make_configured(label, algorithm, study_flags, objects)
        else:
            variant = _make_custom(label, number, algorithm, study_flags, objects)
        if variant.label in variants:
            raise BadRequest(
                f"compare has {variant.label!r} twice: give another label, as in "
                "{'other': …}"
            )
        variants[variant.label] = variant
    return [*variants.values()]


def _read_one(text: str) -> VariantWords:
    """Reads a name with flags; raises a BadRequest for several."""
    algorithms = read_algorithms(text)
    if len(algorithms) != 1:
        raise BadRequest(
            f"{text!r} has several algorithms: give each as an item of its own"
        )
    return algorithms[0]


def _make_named(
    words: VariantWords, study_flags: StudyFlags, objects: Objects
) -> Variant:
    """Makes a variant of a name with flags."""
    preset_flags = [x for x in study_flags.shared if x[0] == flag_name("preset")]
    variant_words = complete_variant(
        words._replace(objects=objects), task=study_flags.task, shared=preset_flags
    )
    return variant_words.parse()


def _make_configured(
    label: str, algorithm: RunConfig, study_flags: StudyFlags, objects: Objects
) -> Variant:
    """Makes a variant of a config, whose own settings differ from the defaults."""
    if algorithm.task != RUN_SETTINGS["task"].default:
        raise BadRequest(
            f"compare trains one task: name {algorithm.task!r} in flags, and leave "
            "it out of the RunConfig"
        )
    own_values = run_flags.find_changed_values(algorithm)
    for name in ("algo", "task"):
        del own_values[name]
    words = as_words(own_values)
    variant = _make_default(
        label or " ".join([algorithm.algo, *words]),
        algorithm.algo,
        study_flags,
        objects,
        preset=algorithm.preset,
    )
    for name in own_values:
        if name not in {*variant.readers, *RUN_SETTINGS}:
            raise unknown_flag(name, [variant], [*variant.readers])
    return variant._replace(
        config=at(variant.config, own_values),
        words=tuple(words),
        parameters=variant.parameters | own_values.keys(),
    )


def _make_custom(
    label: str,
    number: int,
    algorithm: Any,
    study_flags: StudyFlags,
    objects: Objects,
) -> Variant:
    """Makes a variant of a strategy or its factory, labelled by its name or place."""
    _check_object(algorithm, Strategy)
    if not label:
        name = getattr(algorithm, "__name__", "")
        label = name if name.isidentifier() else f"strategy {number}"
    imported_name = _find_import(algorithm)
    if imported_name:
        return _make_default(label, imported_name, study_flags, objects)
    objects = replace(objects, strategy=algorithm)
    return _make_default(label, YOUR_OWN, study_flags, objects)


def _make_default(
    label: str,
    algo: str,
    study_flags: StudyFlags,
    objects: Objects,
    *,
    preset: str | None = None,
) -> Variant:
    """Makes a variant of an algorithm with its defaults."""
    task = study_flags.task
    algorithm, own_task = objects.describe_both(algo, task)
    readers = find_readers([algorithm, own_task])
    if PAPER in (preset, study_flags.preset):
        algorithm = algorithm.published()
    with refusing():
        config = RunConfig(
            algo=algo,
            task=task,
            displacements=True,
            arguments=_defaults(algorithm),
            task_arguments=_defaults(own_task),
        )
    names = [parameter(flag) for flag in ADDED]
    return Variant(
        label=label,
        config=config,
        parameters=frozenset(["algo", "task", *names]),
        readers=readers,
        objects=objects,
    )


def _defaults(factory: Factory) -> dict[str, Any]:
    """Returns the defaults of a factory's flags; None for those without."""
    return {name: factory.defaults.get(name) for name in factory.flags}


def _complete(
    variant: Variant,
    task: str,
    shared: Mapping[str, Any],
    *,
    tuned: Sequence[Axis],
    swept: Sequence[Axis],
) -> Variant:
    """Gives a variant those of the shared values and axes that its runs have.

    Raises:
        BadRequest: its runs do not accept them, or lack a value without a default.
    """
    values: dict[str, Any] = {}
    for name, value in shared.items():
        if name in variant.readers and name not in variant.own_names:
            values[name] = _read_value(name, variant.readers[name], value)
    own_swept = choose_axes(swept, variant.readers)
    own_tuned = choose_axes(tuned, variant.readers)
    first_texts = {axis.flag: axis.values[0] for axis in own_swept}
    varied_names = [axis.flag for axis in (*own_swept, *own_tuned)]
    parameters = variant.parameters | values.keys() | {*varied_names}
    for factory in variant.objects.describe_both(variant.algo, task):
        missing = factory.flags.keys() - factory.defaults.keys() - parameters
        if missing:
            raise BadRequest(
                f"the following arguments are required: {flag_name(min(missing))}"
            )
    return variant._replace(
        config=at(variant.config, values | variant.read(first_texts)),
        parameters=parameters,
        swept=own_swept,
        tuned=own_tuned,
    )


def _read_value(name: str, read: Callable[[str], Any], value: Any) -> Any:
    """Returns a value in the type of its parameter.

    A text or a number is what a command line would say of it: an int becomes the float
    that a flag takes, and 1.5 is no period.

    Raises:
        BadRequest: it is no value of the parameter.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(value, str) or is_number:
        return read_text(name, read, str(value))
    return value


def _check_object(x: Any, kind: type) -> None:
    """Raises a BadRequest unless this is an object of a kind, or its factory."""
    if not (isinstance(x, kind) or callable(x)):
        raise BadRequest(f"compare takes names, objects and factories, got {shown(x)}")


def _find_import(x: Any) -> str:
    """Returns the name by which any process can import a factory; "" if none can."""
    if not callable(x):
        return ""
    module = getattr(x, "__module__", "")
    name = getattr(x, "__name__", "")
    is_there = getattr(sys.modules.get(module), name, None) is x
    return f"{module}:{name}" if is_there and module != "__main__" else ""
