"""The numbers that the layout is held to; `make structure` prints all of them."""

import re
import tomllib

import pytest
from structure import PACKAGES, RATCHET, ROOT, arrows, circle, files, measured, rooms


def all_files():
    return {path: file for x in PACKAGES for path, file in files(x).items()}


def test_no_figure_is_above_its_bound():
    bounds = tomllib.loads(RATCHET.read_text())
    for table, figures in measured().items():
        for name, figure in figures.items():
            assert figure <= bounds[table][name], f"{table}.{name} in {RATCHET.name}"
            # Half of a way is one that route.py cannot follow any more.
            assert table != "argv" or figure > bounds[table][name] / 2, name


def test_no_files_import_each_other():
    assert circle(arrows(all_files())) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_between_rooms_go_one_way(package):
    assert circle(rooms(arrows(files(package)))) == []


@pytest.mark.parametrize("package", [*PACKAGES, "tests"])
def test_docstrings_begin_with_a_verb_or_a_noun(package):
    begun = re.compile(r'^\s*r?"""(?:What|Of|Who|Whose|How|Which|Where|That|Those)\b')
    for path in files(package):
        for number, line in enumerate((ROOT / path).read_text().splitlines(), 1):
            assert not begun.match(line), f"{path}:{number}: {line.strip()}"


def test_words_that_readers_stumbled_over_stay_away():
    listed = (ROOT / "CONTRIBUTING.md").read_text().partition("A test refuses")[2]
    refused = re.compile(rf"\b({'|'.join(re.findall('`(.+?)`', listed))})\b", re.I)
    paths = [ROOT / path for path in (*all_files(), "README.md")]
    globs = "docs/*.md", "docs/[!_]*/**/[!_]*.md", "examples/*.py"
    paths += [path for each in globs for path in ROOT.glob(each)]
    for path in paths:
        assert not (found := refused.search(path.read_text())), f"{path}: {found[0]}"


def test_page_for_contributors_names_every_room():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    for package in ("syncalgos", "experiments"):
        for folder in (ROOT / package).iterdir():
            if folder.is_dir() and folder.name != "__pycache__":
                assert f"`{package}/{folder.name}/`" in page
