"""Docs: examples run, algorithms have their rows, links lead somewhere."""

import contextlib
import io
import re
import runpy
import sys
from itertools import pairwise

import optax
import pytest
from pages import combinators, core, files, published, table
from support import small_tasks
from support.commands import ROOT, run_program, run_python
from support.tiers import tiers

import syncalgos
from experiments.command import factories
from experiments.tasks import TASKS

PAGES = sorted(p for p in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
OWN_DEVICES = "jax_num_cpu_devices"
# The pages that a newcomer copies from first; examples of all others run in CI.
DEFAULT_PAGES = "README.md", "index.md", "own-loop.md", "adding-an-algorithm.md"


def examples():
    """Each Python block, with the text block that follows it, if one does."""
    for page in PAGES:
        blocks = [*BLOCK.finditer(page.read_text()), None]
        for number, (block, next_block) in enumerate(pairwise(blocks)):
            has_output = (
                next_block
                and next_block[1] == "text"
                and next_block.start() - block.end() < 3
            )
            expected_output = next_block[2] if has_output else None
            if block[1] == "python":
                marks = [pytest.mark.slow] * (page.name not in DEFAULT_PAGES)
                name = f"{page.name}-{number}"
                yield pytest.param(block[2], expected_output, id=name, marks=marks)


EXAMPLES = list(examples())
IN_PROCESS = [
    example for example in EXAMPLES if OWN_DEVICES not in str(example.values[0])
]
WITH_OWN_DEVICES = [example for example in EXAMPLES if example not in IN_PROCESS]


@pytest.mark.parametrize(("source", "expected_output"), IN_PROCESS)
def test_example_runs_and_prints_what_it_shows(source, expected_output):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, "example", "exec"), {"__name__": "__main__"})
    assert printed.getvalue() == (expected_output or "")


@pytest.mark.slow
@pytest.mark.parametrize(("source", "expected_output"), WITH_OWN_DEVICES)
def test_example_with_devices_of_its_own_prints_what_it_shows(source, expected_output):
    printed, _ = run_python(["-c", source], timeout=300, XLA_FLAGS=None)
    assert printed == (expected_output or "")


def own_loops_on_meshes():
    """The programs of examples and pages that map their own loop over devices."""
    programs = {p.name: p.read_text() for p in sorted(ROOT.glob("examples/*.py"))}
    programs |= {example.id: str(example.values[0]) for example in EXAMPLES}
    for name, source in programs.items():
        if "make_mesh" in source and "DataParallel" not in source:
            yield pytest.param(source, id=name)


@pytest.mark.slow
@pytest.mark.parametrize("source", [*own_loops_on_meshes()])
def test_program_on_a_mesh_waits_for_each_call(source, tmp_path):
    """Two calls in flight on CPU devices deadlock at times, and XLA aborts."""
    program = tmp_path / "program.py"
    program.write_text(source)
    printed, _ = run_python(
        ["tests/support/calls_in_flight.py", str(program)],
        timeout=300,
        JAX_NUM_CPU_DEVICES="4",
    )
    counts = re.fullmatch(r"(\d+) calls, (\d+) in flight", printed.splitlines()[-1])
    assert counts and int(counts[1]) > 4
    assert int(counts[2]) == 0


def test_guides_and_examples_import_no_private_module():
    public = {"algorithms", "collectives", "reducers", "writing"}
    texts = []
    for page in PAGES:
        texts += [code for _, code in BLOCK.findall(page.read_text())]
    texts += [x.read_text() for x in ROOT.glob("examples/*.py")]
    used = re.findall(r"(?:from|import) syncalgos\.(\w+)", "\n".join(texts))
    assert "writing" in used and {*used} <= public


def test_table_and_list_of_algorithms_are_what_the_registry_says():
    table_text = table.TABLE.read_text("utf-8")
    assert table_text.count("\n`") == len(syncalgos.ALGORITHMS)
    assert table_text == table.format_table(), "make table"
    page = table.PAGE.read_text()
    assert page == table.filled(page), "make table"


def test_the_site_shows_the_code_of_the_core():
    page = core.PAGE.read_text("utf-8")
    marks = list(core.MARK.finditer(page))
    assert len(marks) == page.count("<!-- ") >= 8
    for mark in marks:
        assert mark["link"].endswith(f"](../{mark['file']})\n")
    filled_page = core.filled(page)
    assert filled_page.count("```python\n") == len(marks) + page.count("```python\n")
    assert 80 <= filled_page.count("\n") - page.count("\n") <= 150


def test_a_block_of_an_unknown_function_is_refused():
    with pytest.raises(LookupError, match=r"no bmuf\.step .* change its mark"):
        core.find_code("def bmuf():\n    x = 1\n", "bmuf.step")


def test_algorithms_without_a_center_of_their_own():
    names = table.find_without_own_center()
    assert {"model_averaging", "gossip"} <= {*names}
    # A center w, a center c, and no sync of params.
    assert {"bmuf", "easgd", "sync_sgd"}.isdisjoint(names)


def test_algorithms_with_layered_leaves():
    names = table.find_layered()
    assert {"powersgd", "diloco_x"} <= {*names} and "bmuf" not in names


@pytest.mark.parametrize("page", table.COUNTING_PAGES, ids=lambda page: page.name)
def test_prose_has_the_number_of_algorithms(page):
    counts = [count for _, count in table.COUNT.findall(page.read_text())]
    assert len(counts) == (2 if page.name == "README.md" else 1)
    assert {*counts} == {str(len(syncalgos.ALGORITHMS))}, "make table"


def test_counting_leaves_other_numbers_of_algorithms():
    counted = table.fill_count(
        "implements 2 algorithms. 45 of\n  the 2 algorithms; 3 of"
    )
    number = len(syncalgos.ALGORITHMS)
    assert counted == (
        f"implements {number} algorithms. 45 of\n  the {number} algorithms; 3 of"
    )
    measured = "half of it overlaps for 26 of the 45 algorithms"
    assert table.fill_count(measured) == measured


KINDS = ("diloco", "gossip", "powersgd")
ALL = tuple(syncalgos.ALGORITHMS)


@pytest.mark.skipif(sys.version_info > (3, 12), reason="the page is of jax 0.10")
@pytest.mark.parametrize(
    "names", tiers([KINDS, ALL], slow=[KINDS]), ids=["kinds", "all"]
)
def test_table_of_stacked_replicas_is_what_compiled_programs_send(names):
    environ = {"PYTHONPATH": f"{ROOT}:{ROOT}/docs", "JAX_NUM_CPU_DEVICES": None}
    ended = run_program(
        [sys.executable, "-m", "pages.stacked", *names], timeout=900, **environ
    )
    rows = [line for line in ended.stdout.splitlines() if line.startswith("| `")]
    page = (ROOT / "docs" / "tables" / "stacked.txt").read_text()
    assert len(rows) == len(names), ended.stderr
    assert {*rows} <= {*page.splitlines()}, "make table"


def quoted_names(cell):
    return re.findall("`(.+?)`", cell)


[COMBINATOR_TABLE] = table.MARKED.findall(combinators.PAGE.read_text("utf-8"))
HEAD, _, *ROWS = (
    line[2:-2].split(" | ") for line in COMBINATOR_TABLE.split("\n\n")[0].splitlines()
)
REASONS = dict(re.findall(r"^(\d+)\. (.*)$", COMBINATOR_TABLE, re.MULTILINE))


@pytest.mark.slow
def test_table_of_combinators_has_each_strategy_once():
    table_names = []
    for head_cell, *_ in ROWS:
        table_names += quoted_names(head_cell)
    assert sorted(table_names) == sorted(combinators.strategies())


# One strategy of each row; that others are taken alike is long.
@pytest.mark.parametrize(
    "name",
    tiers(
        *(combinators.strategies(), ["bmuf", "heloco", "average()"]),
        {quoted_names(head_cell)[0] for head_cell, *_ in ROWS},
    ),
)
def test_table_of_combinators_says_what_they_refuse_and_why(name):
    [row] = [row for row in ROWS if name in quoted_names(row[0])]
    cells = {}
    for group, cell in zip(HEAD, row, strict=True):
        reason = REASONS.get(cell[4:-1], cell)
        cells |= dict.fromkeys(quoted_names(group), reason)
    table_cells = [cells[around] for around in combinators.AROUND]
    assert table_cells == [x or "yes" for x in combinators.cells(name)], "make table"


@pytest.mark.parametrize("name", published.read_toml(published.DEFAULTS))
def test_each_flag_of_an_algorithm_says_where_its_default_comes_from(name):
    defaults = factories.describe_factory(factories.ALGORITHM, name).defaults
    rows = published.find_defaults(name)
    flags = [row.flag.removeprefix("--").replace("-", "_") for row in rows]
    assert sorted(flags) == sorted(defaults)
    for flag, row in zip(flags, rows, strict=True):
        has_words = "here" in published.read_toml(published.DEFAULTS)[name][flag]
        assert has_words == (defaults[flag] is None)
        assert f"| `{row.flag}` | {row.here} | " in published.defaults_table(name)


def test_presets_of_papers_are_of_flags_with_a_source():
    presets = published.read_toml(factories.PUBLISHED)
    assert presets.keys() <= published.read_toml(published.DEFAULTS).keys()
    preset_values = {row.preset for row in published.find_defaults("slowmo")}
    assert preset_values == {"12", "0.7", ""}


def test_differences_are_of_algorithms_and_stand_on_their_pages():
    for difference in published.read_toml(published.DIFFERENCES)["difference"]:
        for name in difference["algorithms"]:
            assert name in syncalgos.ALGORITHMS
            assert published.differences_list(name).count("\n- ") >= 1


def test_no_file_of_algorithms_is_unregistered():
    """--help lists the files, so as not to import jax: they must be the registry."""
    paths = (ROOT / "syncalgos" / "algorithms").glob("[!_]*.py")
    assert {file.stem for file in paths} == set(syncalgos.ALGORITHMS)


SCHEDULE_WORDS = {"constant": "", "cosine": " with cosine", "step": " and steps"}


def test_table_of_tasks_tells_how_each_is_trained():
    page = (ROOT / "docs" / "models-and-tasks.md").read_text()
    rows = re.findall(r"^\| (`.*?) \|.*\| ((?:SGD|Adam).*?) \|", page, re.M)
    optimizer_by_task = {}
    for names, words in rows:
        optimizer_by_task |= dict.fromkeys(re.findall(r"`(\w+)`", names), words)
    for name in TASKS:
        task = small_tasks.make(name)
        optimizer_words = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}[
            task.optimizer
        ]
        optimizer_words += f" with momentum {task.momentum}" if task.momentum else ""
        rate = task.lr.get(task.optimizer, task.lr[""])
        assert (
            optimizer_by_task[name]
            == f"{optimizer_words}{SCHEDULE_WORDS[task.schedule]}, {rate:g}"
        )


LINKED = [*ROOT.glob("*.md"), *ROOT.glob("*/README.md")]
LINKED += [ROOT / page for page in files.sources()]


@pytest.mark.parametrize("page", LINKED, ids=lambda x: str(x.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert link.startswith("https://") or (page.parent / link).exists(), link


def test_other_names_lead_to_code_that_runs_or_to_a_composition():
    page = (ROOT / "docs" / "algorithms.md").read_text()
    section = page.partition("## Other names\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+) \| (.+) \|$", section, re.MULTILINE)[1:]
    functions = runpy.run_path(str(ROOT / "examples" / "compositions.py"))
    names = vars(syncalgos) | {"optax": optax}
    for _, cell in rows:
        calls = re.findall(r"`(.+?)`", cell)
        links = re.findall(r"\[`(\w+)`\]\(\.\./examples/compositions\.py\)", cell)
        assert calls or links
        for call in calls:
            eval(call, names | functions)
        for link in links:
            assert callable(functions[link])
