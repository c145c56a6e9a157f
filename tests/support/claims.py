"""The figures of pages, from the records of studies, by NumPy and SciPy alone.

claims.toml has words of each page, a line for each claim, in the page's order, with
placeholders for figures. `{A}` is the mean ± deviation of a row, `{A - B}` the paired
difference with its 95 % interval; a word and a colon ask for another figure, as does
`{interval: A - B}`: see `Part.figures`. A row is its label, the value that was swept,
and other conditions: `slowmo@32,lr=0.1,reported=false`. `{examples: A - B}` is the
interval that also includes the chance of drawing test examples, and `{range}` the least
and the most of the means of `set`, a list of rows or of differences. Where a part of a
page rests on several records, the name of one stands before it: `long:QSR@0.05`. A part
without records has a source, and no placeholders. `each` is a line for each row of the
records `but` one.

    python tests/support/claims.py

writes the figures into the pages, rounded as they were. The words around them, such as
"better", remain to be read.

    make claims

recomputes every figure without writing, and says how many numbers of each page that
covers. `make claims CLAIMS=--list` also lists the numbers that no claim covers, such as
settings and what other papers say. The exit code is 1 if a figure differs.
"""

import argparse
import itertools
import json
import re
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.stats import t as student
from scipy.stats import ttest_1samp

ROOT = Path(__file__).parents[2]
STUDIES = ROOT / "docs" / "studies"
CLAIMS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
HOLE = re.compile(r"\{(.+?)\}")
NUMBER = r"([+-]?\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?)"


@cache
def read_lines(path):
    lines = (STUDIES / path).read_text("utf-8").splitlines()
    records = []
    for line in lines:
        fields = json.loads(line)
        records.append({key: take_last(value) for key, value in fields.items()})
    return records


@cache
def read_finals(path, conditions, measure):
    lines = []
    for line in read_lines(path):
        is_of_row = all(line.get(k, k == "reported") == x for k, x in conditions)
        if is_of_row and not line.get("diverged"):
            lines.append(line)
    ends = {line["seed"]: line[measure] for line in lines}
    assert len(ends) == len(lines) > 0, f"{conditions} is not one row of {path}"
    return ends


def take_last(value):
    """The last of a curve."""
    return value[-1] if isinstance(value, list) else value


def literal(text):
    """The value that a file of JSON has for a word on a page."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


class Part:
    """Some claims of a page, and the records that they rest on."""

    def __init__(self, claims):
        records = claims.get("records", {})
        self.records = {"": records} if isinstance(records, str) else records
        self.sweep_key = claims.get("by", "")
        self.measure = claims.get("measure", "test_accuracy")
        self.scale = claims.get("scale", 100 if self.measure == "test_accuracy" else 1)
        self.family = claims.get("family", [])
        self.set = claims.get("set", [])

    def row(self, words):
        """The file of a row, and what its lines have in common."""
        label, _, conditions = words.partition("@")
        name, _, label = label.rpartition(":")
        row_conditions = {"label": label, "reported": True}
        for condition in filter(None, conditions.split(",")):
            key, _, value = condition.rpartition("=")
            row_conditions[key or self.sweep_key] = literal(value)
        return self.records[name or next(iter(self.records))], row_conditions

    def rows(self, hole):
        return [self.row(x) for x in re.split(" [-/] ", hole.rpartition(": ")[2])]

    def ends(self, row, key=""):
        """The figures of a row by seed, without lost runs."""
        path, row_conditions = row
        return read_finals(path, tuple(row_conditions.items()), key or self.measure)

    def values(self, row, key=""):
        return np.array([*self.ends(row, key).values()])

    def pairs(self, row, base):
        """The differences of two rows over the seeds of both."""
        ends = self.ends(row)
        base_ends = self.ends(base)
        seeds = ends.keys() & base_ends.keys()
        return np.array([ends[seed] - base_ends[seed] for seed in seeds])

    def correctness(self, row):
        """By seed, which test examples a model is right on, (examples,) of 0 and 1."""
        path, row_conditions = row
        correct_by_seed = {}
        for line in read_lines(path):
            if line | row_conditions == line and not line["diverged"]:
                code = np.frombuffer(bytes.fromhex(line["correct"]), np.uint8)
                bits = np.unpackbits(code)
                num_examples = round(bits.sum() / line["test_accuracy"])
                correct_by_seed[line["seed"]] = bits[:num_examples].astype(float)
        return correct_by_seed

    def interval_with_examples(self, row, base):
        """The interval of a difference whose test examples might be others, too.

        Over S seeds and E examples, the variance of the mean is that over seeds / S,
        plus that over examples / E, plus that of the rest / (S E). Their estimates are
        those of the mean squares of both margins and of the rest.

        Source: Owen, "The pigeonhole bootstrap", Annals of Applied Statistics 2007.
        """
        row_correct = self.correctness(row)
        base_correct = self.correctness(base)
        seeds = sorted(row_correct.keys() & base_correct.keys())
        gains = np.array([row_correct[seed] - base_correct[seed] for seed in seeds])
        num_seeds, num_examples = gains.shape
        by_seed = gains.mean(axis=1)
        by_example = gains.mean(axis=0)
        unexplained = gains - by_seed[:, None] - by_example + gains.mean()
        unexplained_variance = (unexplained**2).sum() / (
            (num_seeds - 1) * (num_examples - 1)
        )
        example_variance = by_example.var(ddof=1) - unexplained_variance / num_seeds
        variance = by_seed.var(ddof=1) / num_seeds
        variance += max(0.0, example_variance) / num_examples
        half = student.ppf(0.975, num_seeds - 1) * np.sqrt(variance)
        mean = by_seed.mean()
        return [self.scale * (mean - half), self.scale * (mean + half)]

    def range_of_set(self):
        """The least and the most of the means of the part's set."""
        means = []
        for words in self.set:
            rows = [self.row(row) for row in words.split(" - ")]
            values = self.pairs(*rows) if rows[1:] else self.values(*rows)
            means.append(self.scale * values.mean())
        return [min(means), max(means)]

    def labels(self):
        """The rows that no record has lost."""
        labels_by_record = []
        for path in self.records.values():
            ended = [x for x in read_lines(path) if x["reported"] and not x["diverged"]]
            labels_by_record.append({line["label"] for line in ended})
        return sorted(set.intersection(*labels_by_record))

    def corrected(self, row, base):
        """The p-value of a difference, by Holm, among those that are read with it.

        These are `family`; else those of all rows with the baseline beside each, or
        where a row is compared with itself at another point, those of its points.
        """
        family = [[*map(self.row, pair.split(" - "))] for pair in self.family]
        if not family:
            lines = read_lines(row[0])
            swept_values = {line.get(self.sweep_key) for line in lines}
            points = [{self.sweep_key: value} for value in swept_values]
            if row[1]["label"] == base[1]["label"]:
                rows = [(row[0], row[1] | point) for point in points]
                family = [[other_row, base] for other_row in rows if other_row != base]
            else:
                labels = {line["label"] for line in lines} - {base[1]["label"]}
                points = points if self.sweep_key else [{}]
                for label, point in itertools.product(labels, points):
                    other_row = (row[0], row[1] | {"label": label} | point)
                    family.append([other_row, (base[0], base[1] | point)])
        p = np.array([ttest_1samp(self.pairs(*pair), 0)[1] for pair in family])
        order = [*np.argsort(p)]
        steps = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
        return min(1, steps[order.index(family.index([row, base]))])

    def figures(self, hole):
        """The figures that a placeholder asks for."""
        if hole == "runs":
            return [sum(len(read_lines(x)) for x in self.records.values())]
        if hole == "range":
            return self.range_of_set()
        kind = hole.rpartition(": ")[0]
        rows = self.rows(hole)
        if kind == "examples":
            return self.interval_with_examples(*rows)
        if kind in ("bytes", "percent"):  # of the first row, in those of the second
            mean_bytes = [self.values(x, "bytes_per_worker").mean() for x in rows]
            return [mean_bytes[0] / mean_bytes[1] * (100 if kind == "percent" else 1)]
        if kind in ("p", "below"):
            return [self.corrected(*rows)]
        if kind in ("rates", "trials", "draws"):  # of tuning; draws: seeds of a trial
            path, conditions = rows[0]
            is_trial = conditions | {"reported": False}
            trials = [line for line in read_lines(path) if line | is_trial == line]
            draws = {line["seed"] for line in trials}
            if kind == "draws":
                return [len(draws)]
            if kind == "rates":
                return [len({line["lr"] for line in trials})]
            return [len(trials) / len(draws)]
        if kind == "seeds":
            return [len(self.ends(rows[0]))]
        if kind == "ratio":
            return [self.values(rows[0]).mean() / self.values(rows[1]).mean()]
        if kind not in ("", "mean", "interval", "high"):  # a key, such as lr
            return [self.values(rows[0], kind).mean()]
        values = self.scale * (self.pairs if rows[1:] else self.values)(*rows)
        mean = [values.mean()]
        if kind == "mean":
            return mean
        if not rows[1:]:
            return [*mean, values.std(ddof=1)]
        ends = [*ttest_1samp(values, 0).confidence_interval(0.95)]
        return {"": mean + ends, "interval": ends, "high": ends[1:]}[kind]


def format_shape(hole):
    """A placeholder as it looks on a page, # for each figure."""
    kind = hole.rpartition(": ")[0]
    if kind in ("interval", "examples"):
        return "[#, #]"
    if hole == "range":
        return "# to #"
    if kind or hole == "runs":
        return "#"
    return "# [#, #]" if " - " in hole else "# ± #"


def pattern(line):
    """Finds a claim, wherever its page breaks lines."""
    pieces = HOLE.split(line)
    pieces[1::2] = [format_shape(hole).replace("#", "\0") for hole in pieces[1::2]]
    words = [re.escape(x) for x in "".join(pieces).split(" ")]
    return re.compile(r"\s+".join(words).replace(re.escape("\0"), NUMBER))


def styled(value, page_figure):
    """A figure, rounded and signed as one that is shown."""
    mantissa, power, _ = page_figure.partition("e")
    decimals = len(mantissa.partition(".")[2])
    sign = "+" if page_figure[0] == "+" else "-"
    return f"{value:{sign}z,.{decimals}{'e' if power else 'f'}}".replace("e-0", "e-")


def fits(page_figure, hole, value):
    """Whether a page shows a figure; float32's rounding may decide a last digit."""
    if hole.startswith("below: "):
        return value < float(page_figure)
    return page_figure in {
        styled(value * x, page_figure) for x in (1 - 1e-5, 1, 1 + 1e-5)
    }


@cache
def claimed(page):
    """The claims of a page: part, line, match, and (placeholder, figure)s."""
    text = (ROOT / page).read_text("utf-8")
    page_claims = []
    for claims in CLAIMS.get(page, []):
        part = Part(claims)
        row_text = claims.get("each", "")
        position = text.index(claims.get("after", ""))
        rows = [x for x in part.labels() if x != claims.get("but")] if row_text else []
        lines = [row_text.replace("ROW", x) for x in rows]
        for line in lines or claims["text"].strip().splitlines():
            match = pattern(line).search(text, position)
            row = text.count("\n", 0, position) + 1
            assert match, f"from {page}:{row} on there is not: {line}"
            position = position if row_text else match.end()
            figures = []
            for hole in HOLE.findall(line):
                figures += [(hole, value) for value in part.figures(hole)]
            page_claims.append((part, line, match, figures))
    return page_claims


class Coverage(NamedTuple):
    """What the claims of a page cover.

    Attributes:
        recomputed: numbers that are recomputed from records.
        sourced: numbers in claims that name another source.
        uncovered: lines and numbers that no claim covers.
        wrong: figures that the records contradict.
    """

    recomputed: int
    sourced: int
    uncovered: list[str]
    wrong: list[str]

    @property
    def numbers(self) -> int:
        """All numbers of the page."""
        return self.recomputed + self.sourced + len(self.uncovered)


# Where numbers are no figures: code, links, and tables that a page includes.
NO_FIGURES = re.compile(r"```.*?```|`[^`]*`|\]\([^)]*\)|https?://\S+", re.DOTALL)


def blank(text):
    """A text whose code and links are spaces, at the same positions."""
    return NO_FIGURES.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def cover(text, claims):
    """Returns what claims, as by `claimed`, cover of the numbers of a text."""
    recomputed = set()
    sourced = set()
    wrong = []
    for _, line, match, figures in claims:
        if not figures:
            sourced.update(range(*match.span()))
        for number, (hole, value) in enumerate(figures, 1):
            recomputed.update(range(*match.span(number)))
            if not fits(match[number], hole, value):
                figure = styled(value, match[number])
                wrong.append(f"{match[number]}, by the records {figure}: {line}")
    num_recomputed = 0
    num_sourced = 0
    uncovered = []
    for match in re.finditer(NUMBER, text):
        if match.start() in recomputed or match.start() + 1 in recomputed:
            num_recomputed += 1
        elif match.start() in sourced:
            num_sourced += 1
        elif blank(text)[match.start()] != " ":
            line_number = text.count("\n", 0, match.start()) + 1
            uncovered.append(f"{line_number}: {match[0]}")
    return Coverage(num_recomputed, num_sourced, uncovered, wrong)


def check(lists_uncovered):
    """Prints what is recomputed on each page; returns the number of wrong figures."""
    studies = sorted(str(path.relative_to(ROOT)) for path in STUDIES.glob("*.md"))
    coverages = {}
    for page in dict.fromkeys([*CLAIMS, *studies]):
        coverage = cover((ROOT / page).read_text("utf-8"), claimed(page))
        coverages[page] = coverage
        print(
            f"{page}: {coverage.numbers} numbers, {coverage.recomputed} recomputed, "
            f"{coverage.sourced} from other sources, {len(coverage.uncovered)} without "
            "a claim"
        )
        for line in coverage.wrong:
            print(f"  wrong: {line}")
        if lists_uncovered:
            for line in coverage.uncovered:
                print(f"  no claim: {line}")
    numbers = sum(coverage.numbers for coverage in coverages.values())
    recomputed = sum(coverage.recomputed for coverage in coverages.values())
    num_wrong = sum(len(coverage.wrong) for coverage in coverages.values())
    print(
        f"{numbers:,} numbers on {len(coverages)} pages, {recomputed:,} recomputed, "
        f"{num_wrong} wrong"
    )
    return num_wrong


def main():
    """Writes the figures of the records into the pages, or checks them."""
    parser = argparse.ArgumentParser(description="The figures of pages.")
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--list", action="store_true", help="list what has no claim")
    arguments = parser.parse_args()
    if arguments.check:
        sys.exit(min(1, check(arguments.list)))
    claims_by_page = {
        page: claimed(page) for page in CLAIMS
    }  # before any page is written
    for page, claims in claims_by_page.items():
        text = (ROOT / page).read_text("utf-8")
        new = [*text]
        for *_, match, figures in claims:
            for number, (hole, value) in enumerate(figures, 1):
                if not fits(match[number], hole, value):
                    first_character, *later_characters = range(*match.span(number))
                    new[first_character] = styled(value, match[number])
                    for character in later_characters:
                        new[character] = ""
        if new != [*text]:
            (ROOT / page).write_text("".join(new), "utf-8")
            print(page)


if __name__ == "__main__":
    main()
