"""Examples: each program of examples/ runs by itself and prints its result."""

import ast
import difflib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from pages import diffs
from support.commands import ROOT, run_python
from support.tiers import tiers

import syncalgos

FOLDER = ROOT / "examples"
PROGRAMS = sorted(path.name for path in FOLDER.glob("*.py"))
SYNCS = 400 // 20
LEAVES = 64 * 64, 64 * 10


@functools.cache
def printed(name):
    """Runs a program as its docstring says, and returns what it printed."""
    return run_python([f"examples/{name}"])[0]


def numbers(label, text):
    """The numbers behind a label."""
    return [float(x.replace(",", "")) for x in re.findall(rf"{label} ([\d.,]+)", text)]


TRAINED = {  # programs, and how many trained models each of them tests
    "after.py": 4,
    "before.py": 4,
    "custom_reducer.py": 2,
    "equinox_after.py": 1,
    "equinox_before.py": 1,
    "fsdp_after.py": 1,
    "fsdp_before.py": 1,
    "harness.py": 2,
    "linen_after.py": 1,
    "linen_before.py": 1,
    "nnx_after.py": 1,
    "nnx_before.py": 1,
    "outer_optimizer.py": 2,
    "shard_map_loop.py": 1,
    "stacked_state.py": 1,
}
PAIRS = "", "nnx_", "linen_", "equinox_", "fsdp_"


@pytest.mark.parametrize("name", tiers(TRAINED, slow=["after.py", "custom_reducer.py"]))
def test_models_of_an_example_learn_the_digits(name):
    accuracies = numbers("test accuracy", printed(name))
    assert len(accuracies) == TRAINED[name]
    # The nearest mean of a class is right for 0.89 of these images.
    assert min(accuracies) > 0.9
    assert accuracies[-1] > 0.93


def test_page_shows_what_differs_in_the_pairs():
    page = diffs.PAGE.read_text()
    pairs = diffs.MARK.findall(page)
    assert [f"{pair}_" for pair in pairs] == [pair for pair in PAIRS if pair]
    filled_page = diffs.filled(page)
    assert filled_page.count("+import syncalgos\n") == len(pairs)
    assert "<!-- diff" not in filled_page


# The key of the first worker, as the engine derives it from seed and step.
KEY = "jax.random.fold_in(jax.random.key(0), 0x6C6F7373)"
KEY = f"jax.random.fold_in(jax.random.fold_in({KEY}, step - 1), 0)"
SHORT = {
    r"^STEPS = \d+": "STEPS = 60",
    r"range\(1, 401\)": "range(1, 61)",
    r"step % \d+ == 0": "step % 2 == 0",
    r"^jax\.config\.update.*": "",  # the tests have devices
    r"jax\.random\.fold_in\(key, step\)": KEY,
    r"make_mesh\(\(4,\)": "make_mesh((1,)",
    r"\"fsdp\": 4": '"fsdp": 2',
    r"syncalgos\.diloco\(period=\d+\)": "syncalgos.sync_sgd()",
    r"workers=\d": "workers=1",
}


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS)
def test_one_worker_takes_the_steps_of_the_loop_before(pair, capsys):
    printed_numbers = []
    for side in "before", "after":
        source = (FOLDER / f"{pair}{side}.py").read_text()
        for pattern, value in SHORT.items():
            source = re.sub(pattern, lambda _, x=value: x, source, flags=re.M)
        exec(compile(source, side, "exec"), {"__name__": "__main__"})
        text = capsys.readouterr().out
        printed_numbers.append(
            [numbers(label, text) for label in ("loss", "test accuracy")]
        )
    (losses, hits), (losses_after, hits_after) = printed_numbers
    assert len(losses + hits) >= 30 and np.ptp(losses + hits) > 0.1
    # Printed with four digits. Dropout, batch statistics, rates, accumulation, a norm
    # over two shards beside one over none: whatever differs moves more than the last.
    np.testing.assert_allclose(losses_after, losses, rtol=0, atol=2e-4)
    # Of 297 images some lie so near the border that rounding decides.
    np.testing.assert_allclose(hits_after, hits, rtol=0, atol=3.1 / 297)


@pytest.mark.slow  # it takes as long as three others
def test_two_processes_end_with_one_center():
    line = r"workers \[%s\]: test accuracy (0\.9\d+), center ([0-9a-f]{16})\n"
    expected = f"{line % '0, 1'}{line % '2, 3'}the same center\n"
    match = re.fullmatch(expected, printed("two_processes.py"))
    assert match and match.groups()[:2] == match.groups()[2:]


@pytest.mark.slow
def test_two_torch_processes_end_with_the_weights_of_the_data():
    pytest.importorskip("torch", reason="needs torch: the extra benchmarks")
    # Each writes a line's end by itself, so that the other may be before it.
    printed_weights = re.findall(
        r"worker (\d): tensor\(\[\[(.*?)\]", printed("torch_loop.py")
    )
    unit_weights = ", ".join(["1.0000"] * 8)
    assert sorted(printed_weights) == [("0", unit_weights), ("1", unit_weights)]


@pytest.mark.slow
def test_resumed_training_ends_with_the_bits_of_the_uninterrupted_one():
    hashes = dict(map(str.split, printed("resume.py").splitlines()))
    assert [*hashes] == ["uninterrupted", "resumed"]
    assert hashes["uninterrupted"] == hashes["resumed"]
    assert re.fullmatch("[0-9a-f]{64}", hashes["resumed"])


class Dropped(nnx.Module):
    """A layer with dropout, whose stream is a typed key and a count."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(8, 1, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.linear(self.dropout(x))


def change_keys(tree):
    """The same tree with other typed keys."""

    def change(leaf):
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf
        return jax.random.wrap_key_data(jax.random.key_data(leaf) + 1)

    return jax.tree.map(change, tree)


def page_bits():
    """What orbax.md compares: (trainer, state) -> bits."""
    page = (ROOT / "docs" / "orbax.md").read_text()
    names = {}
    exec(page.partition("```python\n")[2].partition("```")[0], names)
    return names["bits"]


def example_hash():
    """What resume.py prints: (trainer, state) -> a hash."""
    names = {}
    exec((FOLDER / "resume.py").read_text(), names)
    return names["sha256"]


@pytest.mark.slow
@pytest.mark.parametrize("make_fingerprint", [page_bits, example_hash])
def test_restored_typed_keys_are_equal_and_others_are_not(make_fingerprint, tmp_path):
    graph, params, buffers = nnx.split(Dropped(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params, buffers, batch, key):
        model = nnx.merge(graph, params, buffers)
        return jnp.mean(model(batch) ** 2), (nnx.state(model, nnx.Not(nnx.Param)), {})

    strategy = syncalgos.diloco(period=2)
    trainer = syncalgos.DataParallel(loss, optax.adam(0.01), strategy, workers=3)
    batches = np.random.default_rng(0).normal(size=(3, 6, 8)).astype(np.float32)
    state, _ = trainer.run(trainer.init(params, buffers), batches)
    with ocp.StandardCheckpointer() as orbax:
        orbax.save(tmp_path / "state", state)
        orbax.wait_until_finished()
        restored = orbax.restore(tmp_path / "state", trainer.init(params, buffers))

    fingerprint = make_fingerprint()
    saved_bits = fingerprint(trainer, state)
    assert fingerprint(trainer, restored) == saved_bits
    other_buffers = change_keys(state.replica.buffers)
    other = state._replace(replica=state.replica._replace(buffers=other_buffers))
    assert fingerprint(trainer, other) != saved_bits


@pytest.mark.slow
def test_reducer_of_two_bits_sends_them_and_a_scale_a_leaf_to_each_worker():
    mean, ternary = (
        numbers("accuracy [0-9.]+,", line)[0]
        for line in printed("custom_reducer.py").splitlines()
    )
    assert mean == SYNCS * 2 * 3 / 4 * 4 * sum(LEAVES)  # a ring of 4 workers, float32
    assert ternary == SYNCS * 3 * sum(leaf * 2 / 8 + 4 for leaf in LEAVES)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one_worker.py", "outer_optimizer.py"])
def test_best_rate_is_that_of_the_least_validation_loss(name):
    text = printed(name)
    chosen = re.findall(
        r"^(\w+): test \w+ [\d.]+ at its best rate, ([\d.]+)$", text, re.M
    )
    assert len(chosen) == 2
    for make, rate in chosen:
        row = rf"^{make} at ([\d.]+): validation loss ([\d.]+)$"
        losses = {
            tried_rate: float(loss) for tried_rate, loss in re.findall(row, text, re.M)
        }
        assert len(losses) == 3
        assert losses[rate] == min(losses.values())


@pytest.mark.slow
def test_a_grid_trains_every_setting():
    row = re.search(r"18 settings, loss ([\d.]+) to ([\d.]+)", printed("grid.py"))
    assert row
    smallest, largest = row.groups()
    assert 0.25 < float(smallest) < float(largest) < 1  # the noise's variance and above


@pytest.mark.slow
def test_the_learnt_outer_rate_is_as_good_as_the_best_of_the_grid():
    rows = re.findall(r"rate ([\d.]+), loss ([\d.]+)", printed("learn_outer_rate.py"))
    (near, best), (learnt, least) = [[*map(float, row)] for row in rows]
    assert least <= best and abs(learnt - near) < 0.3


@pytest.mark.slow
def test_a_strategy_of_ones_own_in_the_harness_has_the_bits_of_the_named_one():
    assert "the same bits as diloco" in printed("harness.py")


@pytest.mark.slow
def test_outer_steps_of_one_worker_end_about_where_the_inner_optimizer_does():
    alone, with_outer_steps = numbers("test loss", printed("one_worker.py"))
    # The program prints what it finds: neither has to be better.
    assert 0 < with_outer_steps < 2 * alone < 0.4


def read_code(name):
    """The lines of a program but for its docstring and blank ones."""
    text = (FOLDER / name).read_text()
    docstring = ast.parse(text).body[0].end_lineno
    return [line for line in text.splitlines()[docstring:] if line.strip()]


def test_a_script_becomes_diloco_by_at_most_12_changed_lines():
    lines_before = read_code("before.py")
    lines_after = read_code("after.py")
    changes = difflib.SequenceMatcher(
        None, lines_before, lines_after, autojunk=False
    ).get_opcodes()
    hunks = [(b - a, d - c) for kind, a, b, c, d in changes if kind != "equal"]
    assert 0 < sum(map(max, hunks)) <= 12


COMPOSITIONS = """\
averaging: 14000 bytes in 2 syncs
loscar: 1400 bytes in 2 syncs
adacomm: averages after steps 1 17 26 32 37 41 45 49 52 55 58 60 63
saps_psgd: 1200 bytes in 3 steps
acco: 3.0
cocodc: sends after steps 4 8 12 16 20 24 28 32
"""


@pytest.mark.slow
def test_compositions_send_what_their_methods_say():
    assert printed("compositions.py") == COMPOSITIONS


@pytest.mark.slow
def test_batch_statistics_of_equinox_do_not_depend_on_the_number_of_workers():
    one_worker, four_workers = printed("equinox_batch_norm.py").splitlines()
    assert one_worker.partition(": ")[2] == four_workers.partition(": ")[2] != ""


@pytest.mark.slow
def test_a_sharded_gpt_learns_and_its_devices_send_their_shards():
    learned, shapes, sent_bytes = printed("sharded_gpt.py").splitlines()
    assert learned == "True True"
    assert shapes == "(2, 1, 2, 64, 256) (1, 1, 2, 32, 128)"
    assert sent_bytes == f"{4259840.0} 4 {4259840 / 4}"


def test_table_and_tests_name_every_program():
    page = (FOLDER / "README.md").read_text()
    rows = "\n".join(line for line in page.splitlines() if line.startswith("| ["))
    assert sorted(re.findall(r"\[(\w+\.py)\]\(\1\)", rows)) == PROGRAMS
    other_programs = "grid learn_outer_rate one_worker resume to_huggingface torch_loop"
    other_programs += " two_processes compositions equinox_batch_norm"
    other_programs += " torchft_loop torchft_members sharded_gpt"
    assert {*TRAINED} | {f"{name}.py" for name in other_programs.split()} == {*PROGRAMS}
