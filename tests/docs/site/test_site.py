"""The documentation as a site: nothing left out, nothing broken, readable anywhere."""

import itertools
import re
import shutil
import sys
from importlib import util
from types import ModuleType

import pytest
from pages import algorithms, docstrings, files, papers, search
from support import websites
from support.commands import ROOT, run_program

import syncalgos

DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
REFERENCE_ENTRY = re.compile(
    r"^(?:\.\. auto\w+::|```{py:\w+}) (?:syncalgos\.)?([\w.]+)", re.MULTILINE
)


def test_each_algorithm_is_of_one_family():
    names_by_family = algorithms.group_by_family()
    names = itertools.chain.from_iterable(names_by_family.values())
    assert sorted(names) == sorted(syncalgos.ALGORITHMS)
    assert all(names_by_family.values())


def test_an_unknown_family_is_refused(monkeypatch):
    def mine():
        """Mine.

        Family: Outer momenta.
        """

    monkeypatch.setattr(syncalgos, "ALGORITHMS", {"mine": mine})
    with pytest.raises(
        ValueError, match=r"mine: .*Outer momentum.* not 'Outer momenta"
    ):
        algorithms.group_by_family()


def test_a_paper_without_an_entry_has_no_bibtex():
    assert papers.folded('Mine, "A paper that nobody has written", 2026.') == ""
    folded_source = papers.folded(docstrings.parsed(syncalgos.diloco).source)
    assert "```bibtex\n@" in folded_source


def test_page_of_an_algorithm_shows_the_formulas_of_its_docstring():
    text = algorithms.update(docstrings.parsed(syncalgos.bmuf))
    [formula] = re.findall(r"^```text\n(.*?)\n```$", text, re.MULTILINE | re.DOTALL)
    formula_lines = [line.strip() for line in formula.splitlines()]
    docstring_lines = [
        line.strip() for line in (syncalgos.bmuf.__doc__ or "").splitlines()
    ]
    first_line = docstring_lines.index(formula_lines[0])
    assert (
        "←" in formula
        and docstring_lines[first_line : first_line + len(formula_lines)]
        == formula_lines
    )


def public(module: ModuleType, prefix: str = "") -> set[str]:
    """Returns names of a package that are no modules, by their place in it."""
    return {
        prefix + name
        for name in dir(module)
        if name[0] != "_" and not isinstance(getattr(module, name), ModuleType)
    }


def test_the_reference_begins_with_the_whole_surface():
    page_words = re.findall(r"\w+", (REFERENCE / "index.md").read_text())
    names = {name for name in dir(syncalgos) if name[0] != "_"}
    assert names - {*syncalgos.ALGORITHMS} <= {*page_words}


def test_every_public_name_has_a_place_in_the_reference():
    reference_names = set(syncalgos.ALGORITHMS)
    for page in REFERENCE.glob("*.md"):
        prefix = ""
        for line in page.read_text().splitlines():
            module = re.match(r"\.\. currentmodule:: syncalgos\.?(\w*)", line)
            if module:
                prefix = f"{module[1]}." if module[1] else ""
            entry = REFERENCE_ENTRY.match(line)
            if entry:
                reference_names.add(
                    (prefix if line.startswith(".. auto") else "") + entry[1]
                )
    names = public(syncalgos) | public(syncalgos.collectives, "collectives.")
    names |= public(syncalgos.reducers, "reducers.")
    assert names - reference_names == set()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site as `make docs` builds it, which takes a minute or two."""
    if util.find_spec("sphinx_book_theme") is None:
        pytest.skip('no sphinx_book_theme here: pip install -e ".[docs]"')
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-E", "-W", "--keep-going"]
    command += ["-d", folder / "doctrees", "-b", "html", DOCS, folder / "html"]
    built = run_program(command, timeout=600, XLA_FLAGS=None)
    assert built.returncode == 0, built.stderr
    return folder / "html"


@pytest.fixture(scope="module")
def browser(site):
    """A browser that shows the site, from a server of this machine."""
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("no chromium and chromedriver here: no browser opens the pages")
    with websites.served(site) as address, websites.opened() as driver:
        yield websites.Browser(driver, address)


@pytest.mark.slow
def test_links_lead_to_pages_and_anchors(site):
    assert websites.broken(site) == []


@pytest.mark.slow
def test_every_page_is_readable_at_any_width_in_both_themes(site, browser):
    flaws = []
    for page in websites.pages(site):
        flaws += websites.flaws(browser, page)
    assert flaws == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        "index.html",
        "algorithms.html",
        "studies/atlas.html",
        "notebooks/five-algorithms.html",
        "reference/strategies.html",
    ],
)
def test_a_page_loads_at_most_a_megabyte(browser, page):
    assert 10_000 < websites.weigh(browser, page) < 1_000_000


SEARCHES = {
    "own data": "models-and-tasks.html",
    "local SGD": "_made/algorithms/model_averaging.html",
    "confidence interval": "comparing.html",
    "learning rate": "choosing.html",
    "1 Gbit/s": "comparing.html",
    "federated averaging": "_made/algorithms/fedavg.html",
    "resume": "many-hosts.html",
    "bmuf": "_made/algorithms/bmuf.html",
}


@pytest.mark.slow
@pytest.mark.parametrize("words", SEARCHES)
def test_search_finds_the_page_and_quotes_it(browser, words):
    results = websites.search(browser, words)
    assert SEARCHES[words] in [result.page for result in results[:3]]
    assert not any("_made/files/" in result.page for result in results)
    assert max(len(result.text) for result in results) > 80


@pytest.mark.slow
def test_each_page_describes_itself(site):
    undescribed = [
        page
        for page in websites.pages(site)
        if 'name="description"' not in (site / page).read_text("utf-8")
    ]
    assert undescribed == ["search.html"]


def test_entries_of_the_search_are_of_pages_that_exist():
    for page in search.ENTRIES:
        name = page.removeprefix("_made/algorithms/")
        assert (DOCS / f"{page}.md").exists() or name in syncalgos.ALGORITHMS, page


def test_source_listings_and_changes_are_hidden_from_the_search():
    examples = search.hide("# A\n", "_made/examples.md")
    assert examples == "# A\n"
    listing = search.hide("---\norphan: true\n---\n\n# A\n", "_made/files/a.py.md")
    assert listing == "---\nno-search: true\norphan: true\n---\n\n# A\n"
    changes = search.hide("# Changelog\n", "_made/changelog.md")
    assert changes == "---\nno-search: true\n---\n\n# Changelog\n"


def test_pages_of_presets_and_records_have_titles_in_words():
    assert files.make_title("experiments/study/presets/atlas/a-b.toml") == (
        "The preset a-b"
    )
    assert files.make_title("docs/records/wire").startswith("Bytes of compiled")
    assert files.make_title("conformance/check.py") == "conformance/check.py"
    for path in files.TITLES:
        assert (ROOT / path).is_dir()


def read_page(text):
    """Returns a page of reStructuredText as docutils reads it, and what changes it."""
    pytest.importorskip("sphinx", reason='needs pip install -e ".[docs]"')
    from docutils.core import publish_doctree
    from pages import prose

    return publish_doctree(text), prose


def test_a_page_is_described_by_its_first_sentences_or_its_title():
    page, prose = read_page("Title\n=====\n\n- an item\n\nOne two. Three.\n\nFour.")
    assert prose.page_description(page) == "One two. Three."
    listing, _ = read_page("a.py\n====\n\n::\n\n    x = 1\n")
    assert prose.page_description(listing) == "a.py"


@pytest.mark.parametrize(
    ("columns", "rows", "classes"),
    [
        (3, 40, []),
        (5, 19, []),
        (5, 20, ["full-width", "long-table"]),
        (7, 3, ["full-width"]),
    ],
)
def test_tables_of_many_columns_take_the_right_column(columns, rows, classes):
    line = "  ".join(["="] * columns)
    cells = "  ".join(["x"] * columns)
    page, prose = read_page("\n".join([line, *[cells] * rows, line]))
    prose.widen_tables(page)
    box = page[0]
    assert box.get("classes") == classes
    assert (box.tagname == "container") == bool(classes)
