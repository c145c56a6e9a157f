"""The documentation as a site: nothing left out, nothing broken, readable anywhere."""

import inspect
import re
import shutil
import sys
from importlib import util
from types import ModuleType

import conf
import pytest
import web
from commands import ROOT, ran
from pages import algorithms, docstrings, links, papers

import syncalgos

DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
ENTRY = re.compile(r"^```{toctree}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(
    r"^(?:\.\. auto\w+::|```{py:\w+}) (?:syncalgos\.)?([\w.]+)", re.MULTILINE
)


def test_each_algorithm_is_of_one_family():
    names_by_family = algorithms.group_by_family()
    names = [name for family in names_by_family.values() for name in family]
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


def test_page_of_an_algorithm_shows_the_formulas_of_its_docstring():
    text = algorithms.update(docstrings.parsed(syncalgos.bmuf))
    [formula] = re.findall(r"^```text\n(.*?)\n```$", text, re.MULTILINE | re.DOTALL)
    shown = [line.strip() for line in formula.splitlines()]
    written = [line.strip() for line in (syncalgos.bmuf.__doc__ or "").splitlines()]
    first = written.index(shown[0])
    assert "←" in formula and written[first : first + len(shown)] == shown


@pytest.mark.parametrize("name", syncalgos.ALGORITHMS)
def test_page_of_an_algorithm_lists_its_parameters(name):
    make = syncalgos.ALGORITHMS[name]
    text = algorithms.signature(name, make, docstrings.parsed(make))
    shown = re.findall(r"^`(\w+)`: `.+`, (?:default|required)", text, re.MULTILINE)
    assert shown == [*inspect.signature(make).parameters]


@pytest.mark.parametrize("name", syncalgos.ALGORITHMS)
def test_page_of_an_algorithm_links_its_papers(name):
    source = docstrings.parsed(syncalgos.ALGORITHMS[name]).source
    found = [*filter(None, map(papers.titled, papers.QUOTED.findall(source)))]
    assert 0 < len(found) == source.count('"') / 2 and all(map(papers.address, found))


def test_numbers_on_the_site_have_minus_signs_and_do_not_break():
    signed = pytest.importorskip("pages.prose").signed
    shown = signed("-0.7 [-1.2, -0.2], 1 - 1/n; 8-bit")
    assert shown == "−0.7 [−1.2,\u00a0−0.2], 1\u00a0−\u00a01/n; 8-bit"


def test_code_of_an_algorithm_is_that_of_its_file():
    shown = algorithms.code(syncalgos.bmuf)
    assert shown.startswith("`syncalgos/algorithms/bmuf.py`, without its docstring:")


def public(module: ModuleType, prefix: str = "") -> set[str]:
    """Returns names of a package that are no modules, by their place in it."""
    return {
        prefix + name
        for name in dir(module)
        if name[0] != "_" and not isinstance(getattr(module, name), ModuleType)
    }


def test_the_reference_begins_with_the_whole_surface():
    shown = re.findall(r"\w+", (REFERENCE / "index.md").read_text())
    names = {name for name in dir(syncalgos) if name[0] != "_"}
    assert names - {*syncalgos.ALGORITHMS} <= {*shown}


def test_every_public_name_has_a_place_in_the_reference():
    shown = set(syncalgos.ALGORITHMS)
    for page in REFERENCE.glob("*.md"):
        prefix = ""
        for line in page.read_text().splitlines():
            if module := re.match(r"\.\. currentmodule:: syncalgos\.?(\w*)", line):
                prefix = f"{module[1]}." if module[1] else ""
            if found := NAMED.match(line):
                shown.add((prefix if line.startswith(".. auto") else "") + found[1])
    names = public(syncalgos) | public(syncalgos.collectives, "collectives.")
    names |= public(syncalgos.reducers, "reducers.")
    assert names - shown == set()


def entries(page: str) -> set[str]:
    """Returns the pages that the toctrees of a page hold, relative to docs/."""
    lines = "\n".join(ENTRY.findall((DOCS / page).read_text())).splitlines()
    folder = (DOCS / page).parent.relative_to(DOCS)
    found = {re.sub(r".*<(.*)>", r"\1", x) for x in lines if x and x[0] != ":"}
    return {str(folder / entry) for entry in found}


def test_every_page_is_in_a_toctree():
    listed = entries("index.md") | entries("reference/index.md")
    for pattern in " ".join(conf.CHILDREN.values()).split():
        listed |= {str(x.relative_to(DOCS))[:-3] for x in DOCS.glob(f"{pattern}.md")}
    pages = {str(page.relative_to(DOCS))[:-3] for page in DOCS.glob("*.md")}
    for folder in ("notebooks", "reference"):
        pages |= {f"{folder}/{page.stem}" for page in (DOCS / folder).glob("*.md")}
    made = {shown.removesuffix(".md") for shown in links.COPIED.values()}
    assert (pages | made) - listed == {"index"}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site as `make docs` builds it: its notebooks run, which takes minutes."""
    if util.find_spec("sphinx_book_theme") is None:
        pytest.skip('no sphinx_book_theme here: pip install -e ".[docs]"')
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-E", "-W", "--keep-going"]
    command += ["-d", folder / "doctrees", "-b", "html", DOCS, folder / "html"]
    built = ran(command, timeout=None, XLA_FLAGS=None)  # notebooks train for minutes
    assert built.returncode == 0, built.stderr
    return folder / "html"


@pytest.fixture(scope="module")
def browser(site):
    """A browser that shows the site, from a server of this machine."""
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("no chromium and chromedriver here: no browser opens the pages")
    with web.served(site) as address, web.opened() as driver:
        yield web.Browser(driver, address)


@pytest.mark.slow
def test_links_lead_to_pages_and_anchors(site):
    assert web.broken(site) == []


@pytest.mark.slow
def test_every_page_is_readable_at_any_width_in_both_themes(site, browser):
    assert [x for page in web.pages(site) for x in web.flaws(browser, page)] == []


@pytest.mark.slow
def test_search_finds_an_algorithm(browser):
    assert "bmuf" in web.search(browser, "bmuf")
