"""The model of time beside a link that is there: `benchmarks.slow_link`."""

import json

import pytest
from support.commands import ROOT

from benchmarks import slow_link
from benchmarks.network.link import NetworkLink


@pytest.mark.parametrize("name", ["slow_link", "slow_link_hosts"])
def test_the_rows_of_the_page_are_those_of_its_records(name):
    lines = (ROOT / "docs" / "records" / f"{name}.jsonl").read_text().splitlines()
    table = slow_link.format_link_table([json.loads(line) for line in lines])
    head, rule, *rows = table.splitlines()
    page = (ROOT / "docs" / "measured.md").read_text()
    page_rows = page.partition(f"\n{head}\n{rule}\n")[2].partition("\n\n")[0]
    assert len(page_rows.splitlines()) >= 3
    assert {*page_rows.splitlines()} <= {*rows}


@pytest.fixture
def link():
    try:
        with NetworkLink() as slow_link_here:
            yield slow_link_here
    except OSError as error:
        pytest.skip(f"no network namespaces with tc: {error}")


@pytest.mark.long
def test_a_round_over_a_long_link_takes_what_the_model_says(link):
    [row] = slow_link.compared(
        [*slow_link.measure_link(link, "sync_sgd", [(1e3, 20.0)])]
    )
    # With one latency a hop the ratio would be 1.8.
    assert 1 / 1.3 < row["ratio"] < 1.3
