"""Published comparisons as data: what they say, and that their flags exist."""

import math
import tomllib

import optax
import pytest
from small_tasks import folder_of

import syncalgos
from experiments.cli import factories, flags
from experiments.cli.errors import BadRequest
from experiments.study import command, config, grid, network, presets, spec
from experiments.training.config import parse

NAMES = config.PRESETS


def content_of(name):
    """A preset's file, read here once more."""
    return tomllib.loads((config.FOLDER / f"{name}.toml").read_text("utf-8"))


def study(argv):
    """A command line's own flags, and its checked spec."""
    asked = config.read(argv)
    return asked.own, spec.of(asked)


def under(name, *argv):
    """A preset with a user's flags."""
    return study(presets.load(name).under(["--preset", name, *argv]))


PUBLISHED = tomllib.loads(flags.PUBLISHED.read_text())


@pytest.mark.parametrize("name", PUBLISHED)
def test_papers_values_are_taken_for_own_flags(name):
    words = ["--algo", name, "--preset", "paper"]
    plain, found = (parse(x).arguments for x in (words[:2], words))
    assert found == plain | PUBLISHED[name]
    assert any(plain[flag] != value for flag, value in PUBLISHED[name].items())
    flag, value = next(iter(PUBLISHED[name].items()))
    other = flag.replace("_", "-")
    said = f"--no-{other}" if value is True else f"--{other}=1"
    assert parse([*words, said]).arguments[flag] in (1, False)
    factory = syncalgos.ALGORITHMS[name]
    offered = {"learning_rate": 0.1, "optimizer": optax.sgd(0.1)}
    given = factories.passed_arguments(factories.ALGORITHM, factory, offered)
    assert isinstance(factory(**found, **given), syncalgos.Strategy)


def test_papers_values_may_be_compared_with_defaults():
    algos = ["--algos", "bmuf, diloco, published=diloco --preset paper"]
    three = command.read(algos).spec
    runs = [parse(three.argv(entry)).arguments for entry in three.entries]
    assert [run["period"] for run in runs] == [16, 16, 500]
    published = command.read(["--preset", "paper", "--algos", "bmuf, diloco"]).spec
    runs = [parse(published.argv(entry)).arguments for entry in published.entries]
    assert [run["period"] for run in runs] == [16, 500]


def test_the_published_comparisons_are_there():
    papers = {name: presets.load(name).paper for name in NAMES}
    authors = {
        "bmuf-speech": ["Chen and Huo", "CNTK", "Caffe2"],
        "slowmo-table": ["Wang", "ICLR 2020"],
        "diloco-language": ["Douillard"],
        "large-batch": ["Goyal"],
        "easgd-mnist": ["Zhang, Choromanska and LeCun"],
    }
    assert authors.keys() <= papers.keys()
    for name, words in authors.items():
        assert all(word in papers[name].source for word in words)


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_says_what_its_paper_found_and_what_is_different(name):
    paper = presets.load(name).paper
    assert paper.preset == name
    assert paper._asdict().keys() - {"preset"} == content_of(name).keys() - {
        "flags",
        "cntk",
    }
    assert all(text == text.strip() and "\n" not in text for text in paper)
    assert any(character.isdigit() for character in paper.found)  # it has figures
    assert min(len(paper.found), len(paper.differs)) > 60


def test_slowmos_table_is_that_of_the_paper():
    found = presets.load("slowmo-table").paper.found
    assert all(figure in found for figure in ("91.73", "93.20", "92.66"))


@pytest.mark.parametrize("name", NAMES)
def test_every_flag_of_a_preset_is_one_of_its_algorithms(name):
    own, decided = under(name)
    content = content_of(name)["flags"]
    assert own.seeds >= 3
    labels = [entry.label for entry in decided.entries]
    assert len(labels) == len(content["algos"])
    assert own.baseline is None or own.baseline in labels
    for text in own.network or []:
        network.parse(text)
    settings = {}
    for entry in decided.entries:
        for value in decided.points(entry):
            swept = []
            if value is not None and decided.sweep is not None:
                swept = [f"--{decided.sweep.flag}", value]
            request_ = parse([*decided.argv(entry), *swept])
            settings |= vars(request_.settings) | request_.arguments
    for flag, value in content.items():
        if (name := flag.replace("-", "_")) not in config.OWN:
            assert settings[name] == value


@pytest.mark.parametrize("name", NAMES)
def test_every_run_of_a_preset_can_be_made_on_the_data(name):
    """A run's settings are refused, if at all, before anything is compiled."""
    _, decided = under(name)
    words = ["--data-dir", str(folder_of(decided.task))]
    decided = decided._replace(words=[*decided.words, tuple(words)])
    loader = grid.Loader()
    points = grid.points(decided, loader)
    samples = set()
    for point in points:
        s = loader.components(point.argv, 0).config
        samples.add((point.entry.label, s.steps * s.batch_size))
        for _, cell in grid.tuning_cells(decided, point):
            parse(cell.argv)
    assert len(samples) == len(decided.entries)  # of each as many, wherever it is swept


def test_goyals_rate_grows_with_the_batch():
    _, decided = under("large-batch")
    points = grid.points(decided, loader := grid.Loader())
    settings = [loader.components(point.argv, 0).config for point in points]
    assert {s.batch_size // s.workers for s in settings} == {8}
    assert max(s.batch_size for s in settings) == 128
    for s in settings:
        assert s.lr / s.batch_size == pytest.approx(0.02 / 8)
    warm = {s.warmup_steps for s in settings}
    assert warm == {0, 30}


# What a user says wins.


def test_a_users_flags_replace_the_presets_of_that_name():
    plain, decided = under("slowmo-table")
    own, changed = under("slowmo-table", "--seeds", "2", "--period=3")
    assert (plain.seeds, own.seeds) == (5, 2)
    assert own.baseline == plain.baseline
    assert ("--period", "12") in decided.words
    periods = [g for g in changed.words if spec.parameter(g[0]) == "period"]
    assert periods == [("--period=3",)]
    assert changed.entries == decided.entries and changed.tune == decided.tune


def test_a_users_value_replaces_what_a_preset_tries_of_it():
    """Else the value would be given in vain."""
    _, decided = under("slowmo-table", "--lr", "0.01")
    assert decided.tune == [] and ("--lr", "0.01") in decided.words
    _, decided = under("easgd-mnist", "--period=4")
    assert decided.sweep is None and ("--period=4",) in decided.words


def test_a_users_algorithms_replace_all_of_the_presets():
    own, decided = under("diloco-language", "--algos", "bmuf")
    assert [entry.label for entry in decided.entries] == ["bmuf"]
    assert own.measure == "test_bits_per_character"


def test_a_users_repeated_flags_replace_all_of_the_presets():
    words = ["--tune", "lr=0.1,0.2", "--tune=period=2,4", "--network", "dsl"]
    plain, _ = under("diloco-language")
    own, decided = under("diloco-language", *words)
    assert len(plain.tune) == 1 and len(plain.network) == 3
    assert [r.flag for r in decided.tune] == ["lr", "period"]
    assert own.network == ["dsl"]


def test_a_user_may_negate_what_a_preset_sets():
    table = {"nesterov": True, "lr": 0.1, "fused": True}
    made = presets.Preset(presets.load(NAMES[0]).paper, presets.words(table))
    assert made.words == ["--nesterov", "--lr", "0.1", "--fused"]
    assert made.under(["--no-nesterov"]) == [
        *("--lr", "0.1", "--fused"),
        "--no-nesterov",
    ]
    assert made.under(["--lr=1"]) == ["--nesterov", "--fused", "--lr=1"]
    assert made.under([]) == made.words


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"nesterov": False}, ["--no-nesterov"]),
        ({"algos": ["a", "b --c 1"]}, ["--algos", "a, b --c 1"]),
        ({"tune": ["x=1,2", "y=3,4"]}, ["--tune", "x=1,2", "--tune", "y=3,4"]),
        ({"seeds": 5, "lr": 0.1}, ["--seeds", "5", "--lr", "0.1"]),
        ({"task": "digits"}, ["--task", "digits"]),
    ],
)
def test_a_table_of_flags_reads_as_a_command_line(table, expected):
    assert presets.words(table) == expected


def test_an_unknown_preset_is_refused_with_what_was_meant():
    with pytest.raises(BadRequest, match="slowmo_tabel") as error:
        config.read(["--preset", "slowmo_tabel"])
    message = str(error.value)
    assert "\n" not in message and all(name in message for name in NAMES)


# CNTK's names.


def cntk():
    """CNTK's switches of the speech preset, and the runs of its flags."""
    _, decided = under("bmuf-speech")
    runs = [parse(decided.argv(e)) for e in decided.entries if e.algo == "bmuf"]
    assert runs
    return content_of("bmuf-speech")["cntk"], runs


def test_cntks_block_is_all_samples_between_two_syncs():
    switches, runs = cntk()
    for run in runs:
        s = run.settings
        own = s.batch_size / s.workers
        assert s.workers * run.arguments["period"] * own == switches["blockSize"]


def test_cntks_time_constant_is_the_block_momentum():
    """As it decays over a block: blockMomentum = exp(-blockSize / time constant)."""
    switches, runs = cntk()
    ratio = switches["blockSize"] / switches["blockMomentumAsTimeConstant"]
    for run in runs:
        found = run.arguments["block_momentum"]
        assert found == round(math.exp(-ratio), 4)
        assert found == 1 - 1 / run.settings.workers  # what CNTK takes by default


def test_cntks_other_switches_agree_with_the_flags():
    switches, runs = cntk()
    assert switches.keys() == {
        *("blockSize", "blockMomentumAsTimeConstant", "blockLearningRate"),
        *("useNesterovMomentum", "resetSGDMomentum"),
    }
    for run in runs:
        assert run.arguments["block_lr"] == switches["blockLearningRate"]
        reset = run.settings.opt_state_at_sync == "reset"
        assert reset == switches["resetSGDMomentum"]
    nesterov = [run.arguments["nesterov"] for run in runs]
    assert switches["useNesterovMomentum"] in nesterov
    assert len(set(nesterov)) == 2  # and the classical form beside it
