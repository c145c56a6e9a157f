"""Published comparisons as data: what they say, and that their flags exist."""

import math
import tomllib
from dataclasses import replace
from itertools import chain

import optax
import pytest
from small_tasks import folder_of

import experiments.compare as compare
import syncalgos
from experiments.cli import factories
from experiments.cli.errors import BadRequest
from experiments.study import config, grid, network, presets, spec
from experiments.training.config import parse

NAMES = presets.NAMES


def content_of(name):
    """A preset's file, read here once more."""
    return tomllib.loads(presets.FILES[name].read_text())


def under(name, *argv):
    """A preset with a user's flags."""
    return config.read(["--preset", name, *argv])


PUBLISHED = tomllib.loads(factories.PUBLISHED.read_text())


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
    offered = {"learning_rate": 0.1, "optimizer": optax.sgd(0.1)}
    made = factories.call(factories.ALGORITHM, name, found, offered, lambda made: None)
    assert isinstance(made, syncalgos.Strategy)


def test_papers_values_may_be_compared_with_defaults():
    algos = ["--algos", "bmuf, diloco, published=diloco --preset paper"]
    three = config.read(algos)
    runs = [parse(variant.argv).arguments for variant in three.variants]
    assert [run["period"] for run in runs] == [16, 16, 500]
    published = config.read(["--preset", "paper", "--algos", "bmuf, diloco"])
    runs = [parse(x.argv).arguments for x in published.variants]
    assert [run["period"] for run in runs] == [16, 500]


def test_the_published_comparisons_are_there():
    papers = {name: presets.paper(name) for name in NAMES}
    authors = {
        "bmuf-speech": ["Chen and Huo", "CNTK", "Caffe2"],
        "slowmo-table": ["Wang", "ICLR 2020"],
        "diloco-language": ["Douillard"],
        "large-batch": ["Goyal"],
        "easgd-mnist": ["Zhang, Choromanska and LeCun"],
    }
    assert authors.keys() <= papers.keys()
    for name, words in authors.items():
        assert all(word in papers[name]["source"] for word in words)


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_says_what_its_paper_found_and_what_is_different(name):
    paper = presets.paper(name)
    assert paper["preset"] == name
    assert paper.keys() - {"preset"} == content_of(name).keys() - {
        "flags",
        "cntk",
    }
    assert all(text == text.strip() and "\n" not in text for text in paper.values())
    assert any(character.isdigit() for character in paper["found"])  # it has figures
    assert min(len(paper["found"]), len(paper["differs"])) > 60


def test_slowmos_table_is_that_of_the_paper():
    found = presets.paper("slowmo-table")["found"]
    assert all(figure in found for figure in ("91.73", "93.20", "92.66"))


@pytest.mark.parametrize("name", NAMES)
def test_every_flag_of_a_preset_is_one_of_its_algorithms(name):
    decided = under(name)
    content = content_of(name)["flags"]
    assert decided.seeds >= 3
    labels = [variant.label for variant in decided.variants]
    assert len(labels) == len(content["algos"])
    assert decided.baseline is None or decided.baseline in labels
    for text in decided.network:
        network.parse(text)
    settings = {}
    for run in chain(*(points.values() for points in decided.points.values())):
        settings |= vars(run) | dict(run.arguments) | dict(run.task_arguments)
    for flag, value in content.items():
        if (name := flag.replace("-", "_")) not in config.SETTINGS:
            assert settings[name] == value


@pytest.mark.sample(4, slow=8)
@pytest.mark.parametrize("name", NAMES)
def test_every_run_of_a_preset_can_be_made_on_the_data(name):
    """A run's settings are refused, if at all, before anything is compiled."""
    decided = under(name)
    words = "--data-dir", str(folder_of(decided.task))
    decided = replace(decided, shared=(*decided.shared, words))
    loader = grid.Loader()
    points = grid.run_sets(decided, loader)
    samples = set()
    for point in points:
        s = loader.plan(point.common)[0].config
        samples.add((point.variant.label, s.steps * s.batch_size))
    assert len(samples) == len(decided.variants)  # as many of each, if swept


STUDIES = [x for x, path in presets.FILES.items() if path.parent.name != "presets"]


@pytest.mark.sample(0, slow=8)
@pytest.mark.parametrize("name", STUDIES)
def test_smallest_cell_of_a_study_runs(name, tmp_path):
    """One value of what is swept, one of what is tuned, one seed, four rounds.

    Three algorithms at most, as tests of their own run each.
    """
    algos = content_of(name)["flags"]["algos"]
    few = [f"--algos={', '.join(algos[-3:])}"] if len(algos) > 3 else []
    decided = under(name, *few)
    swept = [decided.swept] if decided.swept else []
    words = [f"--sweep={each.flag}={each.values[0]}" for each in swept]
    words += [f"--tune={each.flag}={each.values[0]}" for each in decided.tuned]
    period = max(parse(x.argv).arguments.get("period", 1) for x in decided.variants)
    short = f"--steps={4 * period} --eval-every={2 * period} --dispatch-steps={period}"
    words += [
        *short.split(),
        "--seeds=1",
        "--tune-seeds=1",
        f"--data-dir={folder_of(decided.task)}",
        f"--out={tmp_path / 'out'}",
        *few,
    ]
    assert compare.main(["--preset", name, *words]) == 0
    finals = (tmp_path / "out/finals.jsonl").read_text().splitlines()
    assert len(finals) == len(decided.variants) * (1 + bool(decided.tuned))


def test_the_atlas_has_the_45_algorithms_that_it_was_made_of():
    for name in ("atlas-mnist1d", "atlas-spoken-digits"):
        algos = [x.partition("=")[0] for x in content_of(name)["flags"]["algos"]]
        assert algos == sorted({*algos} & {*syncalgos.ALGORITHMS})
        assert len(algos) == 45


def test_goyals_rate_grows_with_the_batch():
    decided = under("large-batch")
    points = grid.run_sets(decided, loader := grid.Loader())
    settings = [loader.plan(point.common)[0].config for point in points]
    assert {s.batch_size // s.workers for s in settings} == {8}
    assert max(s.batch_size for s in settings) == 128
    for s in settings:
        assert s.lr / s.batch_size == pytest.approx(0.02 / 8)
    warm = {s.warmup_steps for s in settings}
    assert warm == {0, 30}


# What a user says wins.


def test_a_users_flags_replace_the_presets_of_that_name():
    plain = under("slowmo-table")
    changed = under("slowmo-table", "--seeds", "2", "--period=3")
    assert (plain.seeds, changed.seeds) == (5, 2)
    assert changed.baseline == plain.baseline
    assert ("--period", "12") in plain.shared
    periods = [g for g in changed.shared if spec.parameter(g[0]) == "period"]
    assert periods == [("--period=3",)]
    assert [x[:3] for x in changed.variants] == [x[:3] for x in plain.variants]
    assert changed.tune == plain.tune


def test_algorithms_of_the_users_own_leave_out_the_presets_baseline():
    changed = under("slowmo-table", "--algos=bmuf,diloco")
    assert changed.baseline is None
    changed = under("slowmo-table", "--algos=bmuf,diloco", "--baseline=diloco")
    assert changed.baseline == "diloco"


def test_a_users_value_replaces_what_a_preset_tries_of_it():
    """Else the value would be given in vain."""
    decided = under("slowmo-table", "--lr", "0.01")
    assert decided.tuned == () and ("--lr", "0.01") in decided.shared
    decided = under("easgd-mnist", "--period=4")
    assert decided.swept is None and ("--period=4",) in decided.shared


def test_a_users_algorithms_replace_all_of_the_presets():
    decided = under("diloco-language", "--algos", "bmuf")
    assert [variant.label for variant in decided.variants] == ["bmuf"]
    assert decided.measure == "test_bits_per_character"


def test_a_users_repeated_flags_replace_all_of_the_presets():
    words = ["--tune", "lr=0.1,0.2", "--tune=period=2,4", "--network", "dsl"]
    plain = under("diloco-language")
    decided = under("diloco-language", *words)
    assert len(plain.tune) == 1 and len(plain.network) == 3
    assert [r.flag for r in decided.tuned] == ["lr", "period"]
    assert decided.network == ("dsl",)


def test_a_user_may_negate_what_a_preset_sets():
    words = presets.words({"nesterov": True, "lr": 0.1, "fused": True})
    assert words == ["--nesterov", "--lr", "0.1", "--fused"]
    assert presets.under(words, ["--no-nesterov"]) == [
        *("--lr", "0.1", "--fused"),
        "--no-nesterov",
    ]
    assert presets.under(words, ["--lr=1"]) == ["--nesterov", "--fused", "--lr=1"]
    assert presets.under(words, []) == words


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
    assert "\n" not in message and "did you mean 'slowmo-table'" in message
    with pytest.raises(BadRequest) as error:  # with nothing near all are listed
        config.read(["--preset", "zzz"])
    assert all(name in str(error.value) for name in NAMES)


# CNTK's names.


def cntk():
    """CNTK's switches of the speech preset, and the runs of its flags."""
    decided = under("bmuf-speech")
    own = [variant for variant in decided.variants if variant.algo == "bmuf"]
    runs = [parse(variant.argv) for variant in own]
    assert runs
    return content_of("bmuf-speech")["cntk"], runs


def test_cntks_block_is_all_samples_between_two_syncs():
    switches, runs = cntk()
    for s in runs:
        assert s.batch_size is not None
        own = s.batch_size / s.workers
        assert s.workers * s.arguments["period"] * own == switches["blockSize"]


def test_cntks_time_constant_is_the_block_momentum():
    """As it decays over a block: blockMomentum = exp(-blockSize / time constant)."""
    switches, runs = cntk()
    ratio = switches["blockSize"] / switches["blockMomentumAsTimeConstant"]
    for run in runs:
        found = run.arguments["block_momentum"]
        assert found == round(math.exp(-ratio), 4)
        assert found == 1 - 1 / run.workers  # what CNTK takes by default


def test_cntks_other_switches_agree_with_the_flags():
    switches, runs = cntk()
    assert switches.keys() == {
        *("blockSize", "blockMomentumAsTimeConstant", "blockLearningRate"),
        *("useNesterovMomentum", "resetSGDMomentum"),
    }
    for run in runs:
        assert run.arguments["block_lr"] == switches["blockLearningRate"]
        reset = run.opt_state_at_sync == "reset"
        assert reset == switches["resetSGDMomentum"]
    nesterov = [run.arguments["nesterov"] for run in runs]
    assert switches["useNesterovMomentum"] in nesterov
    assert len(set(nesterov)) == 2  # and the classical form beside it
