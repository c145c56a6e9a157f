"""The figures of pages, from the records of studies, by NumPy and SciPy alone.

claims.toml has words of each page, a line for each claim, in the page's order, with
placeholders for figures. `{A}` is the mean ± deviation of a row, `{A - B}` the paired
difference with its 95 % interval; a word and a colon ask for another figure, as does
`{interval: A - B}`: see `Part.figures`. A row is its label, the value that was swept,
and other conditions: `slowmo@32,lr=0.1,reported=false`. Where a part of a page rests on
several records, the name of one stands before it: `long:QSR@0.05`. A part without
records has a source, and no placeholders. `each` is a line for each row of the records
`but` one.

    python tests/support/claims.py

writes the figures into the pages, rounded as they were. The words around them, such as
"better", remain to be read.
"""

import json
import re
import tomllib
from functools import cache
from pathlib import Path

import numpy as np
from scipy.stats import ttest_1samp

ROOT = Path(__file__).parents[2]
STUDIES = ROOT / "docs" / "studies"
CLAIMS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
HOLE = re.compile(r"\{(.+?)\}")
NUMBER = r"([+-]?\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?)"


@cache
def lines_of(path):
    lines = (STUDIES / path).read_text("utf-8").splitlines()
    return [{k: last(x) for k, x in json.loads(line).items()} for line in lines]


@cache
def ends_of(path, same, measure):
    lines = [
        line
        for line in lines_of(path)
        if all(line.get(k, k == "reported") == x for k, x in same)
        if not line.get("diverged")
    ]
    ends = {line["seed"]: line[measure] for line in lines}
    assert len(ends) == len(lines) > 0, f"{same} is not one row of {path}"
    return ends


def last(value):
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
        self.by = claims.get("by", "")
        self.measure = claims.get("measure", "test_accuracy")
        self.scale = claims.get("scale", 100 if self.measure == "test_accuracy" else 1)
        self.family = claims.get("family", [])

    def row(self, words):
        """The file of a row, and what its lines have in common."""
        label, _, conditions = words.partition("@")
        name, _, label = label.rpartition(":")
        same = {"label": label, "reported": True}
        for condition in filter(None, conditions.split(",")):
            key, _, value = condition.rpartition("=")
            same[key or self.by] = literal(value)
        return self.records[name or next(iter(self.records))], same

    def rows(self, hole):
        return [self.row(x) for x in re.split(" [-/] ", hole.rpartition(": ")[2])]

    def ends(self, row, key=""):
        """The figures of a row by seed, without lost runs."""
        path, same = row
        return ends_of(path, tuple(same.items()), key or self.measure)

    def values(self, row, key=""):
        return np.array([*self.ends(row, key).values()])

    def pairs(self, own, base):
        """The differences of two rows over the seeds of both."""
        own = self.ends(own)
        base = self.ends(base)
        return np.array([own[seed] - base[seed] for seed in own.keys() & base.keys()])

    def labels(self):
        """The rows that no record has lost."""
        kept = [
            {x["label"] for x in lines_of(path) if x["reported"] and not x["diverged"]}
            for path in self.records.values()
        ]
        return sorted(set.intersection(*kept))

    def corrected(self, own, base):
        """The p-value of a difference, by Holm, among those that are read with it.

        These are `family`; else those of all rows with the baseline beside each, or
        where a row is compared with itself at another point, those of its points.
        """
        family = [[self.row(x) for x in pair.split(" - ")] for pair in self.family]
        if not family:
            lines = lines_of(own[0])
            points = [{self.by: x} for x in {line.get(self.by) for line in lines}]
            if own[1]["label"] == base[1]["label"]:
                rows = [(own[0], own[1] | point) for point in points]
                family = [[row, base] for row in rows if row != base]
            else:
                labels = {line["label"] for line in lines} - {base[1]["label"]}
                family = [
                    [(own[0], own[1] | {"label": x} | at), (base[0], base[1] | at)]
                    for x in labels
                    for at in (points if self.by else [{}])
                ]
        p = np.array([ttest_1samp(self.pairs(*pair), 0)[1] for pair in family])
        order = [*np.argsort(p)]
        steps = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
        return min(1, steps[order.index(family.index([own, base]))])

    def figures(self, hole):
        """The figures that a placeholder asks for."""
        if hole == "runs":
            return [sum(len(lines_of(x)) for x in self.records.values())]
        what = hole.rpartition(": ")[0]
        rows = self.rows(hole)
        if what in ("bytes", "percent"):  # of the first row, in those of the second
            sent = [self.values(x, "bytes_per_worker").mean() for x in rows]
            return [sent[0] / sent[1] * (100 if what == "percent" else 1)]
        if what in ("p", "below"):
            return [self.corrected(*rows)]
        if what in ("rates", "trials", "draws"):  # of tuning; draws: seeds of a trial
            path, same = rows[0]
            own = [x for x in lines_of(path) if x | same | {"reported": False} == x]
            rates = {x["lr"] for x in own}
            draws = {x["seed"] for x in own}
            found = {"rates": rates, "draws": draws, "trials": own}[what]
            return [len(found) / (len(draws) if what == "trials" else 1)]
        if what == "seeds":
            return [len(self.ends(rows[0]))]
        if what == "ratio":
            return [self.values(rows[0]).mean() / self.values(rows[1]).mean()]
        if what not in ("", "mean", "interval", "high"):  # a key, such as lr
            return [self.values(rows[0], what).mean()]
        values = self.scale * (self.pairs if rows[1:] else self.values)(*rows)
        mean = [values.mean()]
        if what == "mean":
            return mean
        if not rows[1:]:
            return [*mean, values.std(ddof=1)]
        ends = [*ttest_1samp(values, 0).confidence_interval(0.95)]
        return {"": mean + ends, "interval": ends, "high": ends[1:]}[what]


def shape(hole):
    """A placeholder as it looks on a page, # for each figure."""
    what = hole.rpartition(": ")[0]
    if what == "interval":
        return "[#, #]"
    if what or hole == "runs":
        return "#"
    return "# [#, #]" if " - " in hole else "# ± #"


def pattern(line):
    """Finds a claim, wherever its page breaks lines."""
    pieces = HOLE.split(line)
    pieces[1::2] = [shape(hole).replace("#", "\0") for hole in pieces[1::2]]
    words = [re.escape(x) for x in "".join(pieces).split(" ")]
    return re.compile(r"\s+".join(words).replace(re.escape("\0"), NUMBER))


def styled(value, shown):
    """A figure, rounded and signed as one that is shown."""
    mantissa, power, _ = shown.partition("e")
    decimals = len(mantissa.partition(".")[2])
    sign = "+" if shown[0] == "+" else "-"
    return f"{value:{sign}z,.{decimals}{'e' if power else 'f'}}".replace("e-0", "e-")


def fits(shown, hole, value):
    """Whether a page shows a figure; float32's rounding may decide a last digit."""
    if hole.startswith("below: "):
        return value < float(shown)
    return shown in {styled(value * x, shown) for x in (1 - 1e-5, 1, 1 + 1e-5)}


@cache
def claimed(page):
    """The claims of a page: part, line, match, and (placeholder, figure)s."""
    text = (ROOT / page).read_text("utf-8")
    made = []
    for claims in CLAIMS.get(page, []):
        part = Part(claims)
        each = claims.get("each", "")
        at = text.index(claims.get("after", ""))
        rows = [x for x in part.labels() if x != claims.get("but")] if each else []
        lines = [each.replace("ROW", x) for x in rows]
        for line in lines or claims["text"].strip().splitlines():
            found = pattern(line).search(text, at)
            row = text.count("\n", 0, at) + 1
            assert found, f"from {page}:{row} on there is not: {line}"
            at = at if each else found.end()
            figures = [(x, y) for x in HOLE.findall(line) for y in part.figures(x)]
            made.append((part, line, found, figures))
    return made


def main():
    """Writes the figures of the records into the pages."""
    all_found = {page: claimed(page) for page in CLAIMS}  # before any page is written
    for page, claims in all_found.items():
        text = (ROOT / page).read_text("utf-8")
        new = [*text]
        for *_, found, figures in claims:
            for number, (hole, value) in enumerate(figures, 1):
                if not fits(found[number], hole, value):
                    first, *rest = range(*found.span(number))
                    new[first] = styled(value, found[number])
                    for at in rest:
                        new[at] = ""
        if new != [*text]:
            (ROOT / page).write_text("".join(new), "utf-8")
            print(page)


if __name__ == "__main__":
    main()
