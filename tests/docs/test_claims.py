"""Every statistical figure on a page of results is that of the records."""

import csv
import itertools
import re

import pytest
from pages import links
from support.claims import (
    CLAIMS,
    HOLE,
    ROOT,
    STUDIES,
    claimed,
    cover,
    fits,
    pattern,
    styled,
)

STUDY_PAGES = (str(path.relative_to(ROOT)) for path in STUDIES.glob("*.md"))
PAGES = sorted(
    [
        *STUDY_PAGES,
        "README.md",
        "docs/choosing.md",
        "docs/index.md",
        "docs/measured.md",
        "docs/studies.md",
    ]
)
# Intervals, deviations, p-values, differences, counts of runs, and shares of bytes.
FIGURE = re.compile(
    r"\[[+-]?[\d.]+,\s[+-]?[\d.]+\]|[\d.e-]+\s±\s[\d.e-]+"
    r"|p\s[=<]\s[\d.]+\d|\d[\d.,]*\s(?:points|nats|runs)\b"
    r"|\d[\d.]*(?:\s%)?\sof\s(?:the|its|`\w+`'s)\sbytes"
)
# Tables with bytes in the second column, and the figures there.
TABLE = re.compile(
    r"^\|[^|]*\| *bytes[^|]*\|.*\n\|[-:| ]*\n((?:\|.*\n)+)", re.MULTILINE
)
CELL = re.compile(r"^\|[^|]*\| ([\d.]+)", re.MULTILINE)


@pytest.mark.parametrize("page", CLAIMS)
def test_a_page_says_what_the_records_say(page):
    for _, line, match, figures in claimed(page):
        for number, (hole, value) in enumerate(figures, 1):
            page_figure = match[number]
            assert fits(page_figure, hole, value), (
                f"{page} has {page_figure}, the records {styled(value, page_figure)}: "
                f"{hole} in "
                f"{line!r}; `python tests/support/claims.py` writes all figures again"
            )


@pytest.mark.parametrize("page", CLAIMS)
def test_what_is_not_seen_has_an_interval_around_zero(page):
    for _, line, _, figures in claimed(page):
        if re.search("no(t|ne|thing)?( is| difference)? (seen(?! after)|measur)", line):
            ends = {}
            for hole, figure in figures:
                if re.match("interval: |[^:]+ - ", hole):
                    ends.setdefault(hole, []).append(figure)
            for *_, low, high in ends.values():
                assert low <= 0 <= high, line


@pytest.mark.parametrize("page", CLAIMS)
def test_no_loss_means_that_half_a_point_is_excluded(page):
    for _, line, _, figures in claimed(page):
        for pair in re.findall(r"{([^}]+)}, no loss|no loss[^{]*{([^}]+)}", line):
            low, _ = [x for hole, x in figures if hole in pair][-2:]
            assert low > -0.5, line


@pytest.mark.parametrize("page", PAGES)
def test_every_figure_of_a_page_is_claimed(page):
    text = (ROOT / page).read_text("utf-8")
    claimed_positions = set()
    for *_, match, figures in claimed(page):
        for span in match.regs[1:] if figures else match.regs:
            claimed_positions.update(range(*span))
    page_figures = [(x.start(), x[0]) for x in FIGURE.finditer(text)]
    for table in TABLE.finditer(text):
        page_figures += [
            (x.start(1), x[1]) for x in CELL.finditer(text, *table.span(1))
        ]
    missing = []
    for position, words in page_figures:
        digits = {position + digit.start() for digit in re.finditer(r"\d", words)}
        if not digits <= claimed_positions:
            line_number = text.count("\n", 0, position) + 1
            missing.append(f"{page}:{line_number} {words}")
    assert not missing, "figures without a line in claims.toml"


def test_advice_links_to_the_table_that_it_rests_on():
    text = (ROOT / "docs" / "choosing.md").read_text("utf-8")
    # An item of a list, or a paragraph with its table.
    leaves = re.split(r"\n\n(?!\|)|\n(?=- )", text)
    for part, line, match, _ in claimed("docs/choosing.md"):
        linked = [*links.links(next(x for x in leaves if match[0] in x))]
        rows = itertools.chain.from_iterable(map(part.rows, HOLE.findall(line)))
        for path, conditions in rows:
            name = path.partition("/")[0]
            page = f"studies/{re.sub('^atlas-.*', 'atlas', name)}.md"
            tables = [
                table_below(ROOT / "docs" / page, x[3]) for x in linked if x[2] == page
            ]
            row = f"| `{conditions['label']}`" if "atlas" in page else ""
            assert any(row in table for table in tables), f"{line!r}: {page} {row}"


def table_below(page, anchor):
    """The part of a page below the heading that an anchor names: it has a table."""
    for part in re.split(r"^#+ ", page.read_text("utf-8"), flags=re.MULTILINE):
        head = part.partition("\n")[0].lower()
        if re.sub(r"[^\w -]", "", head).replace(" ", "-") == anchor[1:]:
            for file in re.findall(r"^:file: (.+)$", part, re.MULTILINE):
                rows = csv.reader((page.parent / file).read_text("utf-8").splitlines())
                part += "".join(f"\n| {' | '.join(row)} |" for row in rows)
            assert "\n|" in part
            return part
    raise AssertionError(f"{page.name} has no heading {anchor}")


def test_numbers_of_a_page_are_counted_by_what_covers_them():
    """One is recomputed and right, one is wrong, one has a source, two have none."""
    text = (
        "It gains 0.5 points, not 0.7, of 9 [there](page-3.md). Of 12 seeds, `x 4` -2."
    )
    lines = {
        "It gains {mean: A} points, not {mean: B}": [
            ("mean: A", 0.5),
            ("mean: B", 0.6),
        ],
        "of 9 [there]": [],
    }
    claims = []
    for line, figures in lines.items():
        claims.append((None, line, pattern(line).search(text), figures))
    coverage = cover(text, claims)
    assert (coverage.recomputed, coverage.sourced) == (2, 1)
    assert coverage.uncovered == ["1: 12", "1: -2"]
    [wrong] = coverage.wrong
    assert wrong.startswith("0.7, by the records 0.6: It gains")
