"""The model of time beside a link that is there: `benchmarks.slow_link`."""

import json

import pytest
from commands import ROOT

from benchmarks import slow_link
from benchmarks.network.link import Link

RECORDS = ROOT / "docs" / "records" / "slow_link.jsonl"


def test_the_page_has_the_table_of_its_records():
    records = [json.loads(line) for line in RECORDS.read_text().splitlines()]
    assert slow_link.table(records) in (ROOT / "docs" / "results.md").read_text()


@pytest.fixture
def link():
    try:
        with Link() as made:
            yield made
    except OSError as error:
        pytest.skip(f"no network namespaces with tc: {error}")


@pytest.mark.long
def test_a_round_over_a_long_link_takes_what_the_model_says(link):
    records = [*slow_link.measure(link, "sync_sgd", [(1000.0, 20.0)])]
    [found] = slow_link.compared(records)
    # With one latency a hop the ratio would be 1.8.
    assert 1 / 1.3 < found["ratio"] < 1.3
