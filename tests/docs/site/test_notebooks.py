"""Notebooks: each runs in a fresh process and prints the facts that its text uses."""

import re
from pathlib import Path

import pytest
from pages import notebooks
from support.commands import ROOT, run_python

FOLDER = ROOT / "docs" / "notebooks"
NAMES = [path.stem for path in notebooks.find_notebooks()]
LARGEST_FILE = 600_000  # bytes
TIMEOUT = 900  # seconds; the longest takes two CPU minutes

# Figures are drawn where the site draws them: after all cells have run.
DRAWN = """
import io
for number in plt.get_fignums():
    plt.figure(number).savefig(io.BytesIO(), format="svg")
print("figures:", len(plt.get_fignums()))
"""


def cells(name):
    """The code of a notebook, cell by cell, without magics."""
    code = notebooks.find_code(notebooks.read(FOLDER / f"{name}.ipynb"))
    magics = re.compile(r"^( *)[%!].*", re.MULTILINE)
    return [magics.sub(r"\1pass", cell.source) for cell in code]


def printed(name, tmp_path):
    """Runs a notebook as a script where the site runs it; returns what it printed."""
    script = tmp_path / "notebook.py"
    script.write_text("\n\n".join([*cells(name), DRAWN]))
    out, err = run_python([script], FOLDER, TIMEOUT, MPLBACKEND="agg", DISPLAY=None)
    # Neither warnings nor messages, but for the progress of a study.
    assert not re.sub(r"^(\d+ runs?|run \d+/\d+ .*)\n", "", err, flags=re.M)
    assert str(ROOT) not in out
    return out


def find_outputs(name):
    """The outputs of the committed notebook, of all cells."""
    notebook = notebooks.read(FOLDER / f"{name}.ipynb")
    outputs = []
    for cell in notebook.cells:
        outputs += cell.get("outputs", [])
    return outputs


@pytest.mark.parametrize("name", NAMES)
def test_outputs_of_a_notebook_are_those_of_its_code(name):
    notebook = notebooks.read(FOLDER / f"{name}.ipynb")
    expected = notebooks.hash_code(notebook)
    assert notebook.metadata[notebooks.CODE_HASH] == expected, "make notebooks"


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_opens_in_colab_and_installs_what_it_needs_there(name):
    title, first_code, *_ = notebooks.read(FOLDER / f"{name}.ipynb").cells
    assert notebooks.make_badge(name) in title.source
    assert "pip install" in first_code.source


@pytest.mark.parametrize("name", NAMES)
def test_links_of_a_notebook_lead_to_files_of_the_repository(name):
    paths = [*notebooks.find_links(notebooks.read(FOLDER / f"{name}.ipynb"))]
    assert len(paths) >= 3
    for path in paths:
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("name", NAMES)
def test_notebook_was_run_from_top_to_bottom_and_shows_its_figures(name):
    notebook = notebooks.read(FOLDER / f"{name}.ipynb")
    code = notebooks.find_code(notebook)
    assert [cell.execution_count for cell in code] == [*range(1, len(code) + 1)]
    kinds = [output.output_type for output in find_outputs(name)]
    assert kinds.count("display_data") == str(cells(name)).count("subplots(")
    assert {*kinds} == {"stream", "display_data"}


@pytest.mark.parametrize("name", NAMES)
def test_notebook_is_small_and_tells_nothing_of_the_machine_that_ran_it(name):
    text = (FOLDER / f"{name}.ipynb").read_text("utf-8")
    assert len(text) < LARGEST_FILE
    notebook = notebooks.read(FOLDER / f"{name}.ipynb")
    assert notebook.metadata.keys() == {
        "kernelspec",
        "language_info",
        notebooks.CODE_HASH,
    }
    assert all(cell.metadata.keys() <= {"tags"} for cell in notebook.cells)
    printed_text = "".join(output.get("text", "") for output in find_outputs(name))
    assert str(ROOT) not in printed_text and str(Path.home()) not in printed_text


def test_links_of_a_notebook_lead_to_pages_on_the_site():
    text = f"[a]({notebooks.REPOSITORY}/docs/choosing.md#x), [b](https://d.org/e.md)"
    on_site = notebooks.show_on_site(text, "five-algorithms")
    assert on_site == "[a](../choosing.md#x), [b](https://d.org/e.md)"


def test_site_loads_no_badge_from_elsewhere():
    text = (FOLDER / "five-algorithms.ipynb").read_text("utf-8")
    site_text = notebooks.show_on_site(text, "five-algorithms")
    assert "badge" in text and "badge" not in site_text
    assert "{download}`download it <five-algorithms.ipynb>`" in site_text


@pytest.mark.long  # `make notebooks` runs it, too
def test_five_algorithms_learn_and_send_what_rings_send(tmp_path):
    text = printed("five-algorithms", tmp_path)
    rows = re.findall(r"^(\w+) +([\d.]+) ± [\d.]+ % +([\d.]+) MB$", text, re.M)
    accuracy = {name: float(value) for name, value, _ in rows}
    megabytes = {name: float(value) for name, _, value in rows}
    assert len(rows) == 5
    assert min(accuracy.values()) > 60  # a linear model reaches 32 %
    assert max(accuracy, key=accuracy.get) in ("sync_sgd", "gossip", "bmuf", "diloco")
    # A ring of eight sends 2 × 7/8 of the params, a gossip all of them; period 8.
    assert megabytes["gossip"] / megabytes["sync_sgd"] == pytest.approx(4 / 7, rel=0.01)
    assert megabytes["diloco"] == megabytes["bmuf"] == megabytes["model_averaging"]
    assert megabytes["diloco"] / megabytes["sync_sgd"] == pytest.approx(1 / 8, rel=0.03)
    assert "figures: 3" in text


@pytest.mark.long  # `make notebooks` runs it, too
def test_own_algorithm_passes_its_test_and_trains_in_the_harness(tmp_path):
    text = printed("your-own-algorithm", tmp_path)
    assert text.startswith("passed\nfailed, as it should: Not equal")
    assert "without momentum it is model averaging" in text
    # 12 syncs of a ring of four: 2 × 3/4 of three float32.
    for name in "restarted", "bmuf":
        assert f"{name}: {12 * 1.5 * 3 * 4:.0f} bytes in 12 syncs" in text
    spread = [float(x) for x in re.findall(r"divergence ([\d.]+)", text)]
    assert [x == 0 for x in spread] == [False, False, False, True, False, False]
    (accuracy,) = re.findall(r"test_accuracy +([\d.]+)", text)
    assert float(accuracy) > 0.93
    assert re.search(r"^effective_lr +0\.1$", text, re.M)  # 0.02 / (1 - 0.8)
    assert re.search(r"^restarted +0\.[89]\d\d$", text, re.M)  # of three seeds
    assert "figures: 2" in text


@pytest.mark.long  # `make notebooks` runs it, too
def test_workers_of_the_gpt_are_sharded_and_diloco_sends_a_tenth(tmp_path):
    text = printed("diloco-gpt", tmp_path)
    array_shape, shard_shape = (
        tuple(map(int, shape_text.split(", ")))
        for shape_text in re.findall(r"(?:up|device): +\(([\d, ]+)\)", text)
    )
    assert array_shape[0] == 4 and shard_shape[0] == 1  # a worker to two devices
    assert array_shape[3] == 2 * shard_shape[3]
    rows = re.findall(
        r"^(\w+) +(\d+) syncs of ([\d.]+) MB .* ([\d.]+) MB a", text, re.M
    )
    (
        (_, syncs, sync_megabytes, sync_total),
        (_, diloco_syncs, diloco_sync_megabytes, diloco_total),
    ) = rows
    assert (
        int(syncs) == 10 * int(diloco_syncs) and sync_megabytes == diloco_sync_megabytes
    )
    assert float(sync_total) == pytest.approx(10 * float(diloco_total), rel=0.01)
    losses = [float(x) for x in re.findall(r"held-out loss ([\d.]+)", text)]
    assert max(losses) < 2.4  # letters drawn by how often they occur have 3.1
    assert "figures: 3" in text


@pytest.mark.long  # `make notebooks` runs it, too
def test_interval_of_a_study_is_that_of_its_table(tmp_path):
    text = printed("reading-a-study", tmp_path)
    ends = r":.* from ([-\d.]+) to ([-\d.]+)$"
    (table_interval,) = re.findall("^table" + ends, text, re.M)
    (own_interval,) = re.findall("^here" + ends, text, re.M)
    assert table_interval == own_interval
    words = re.findall(r"momentum is (better|worse)$", text, re.M)
    assert words[0] == "better" and words[-1] == "worse"
    assert "figures: 3" in text


def test_the_exercise_is_solved_by_the_solution_below_it(capsys):
    notebook = notebooks.read(FOLDER / "five-algorithms.ipynb")
    text = "\n".join(cell.source for cell in notebook.cells)
    [solution] = re.findall(r"<summary>.*?```py\n(.*?)```", text, re.DOTALL)
    exercise = "\n".join(cells("five-algorithms")[-2:])
    solved = re.sub(r".* # change this line\n", solution, exercise)
    for code, message in (exercise, "should be"), (solved, "solved"):
        exec(f"import jax, numpy as np, optax, syncalgos\n{code}", {})
        assert message in capsys.readouterr().out
