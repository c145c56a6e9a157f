"""The joined tables of an atlas."""

import pytest
from reports import NETWORKS, made_up

from benchmarks.harness import atlas
from experiments.study import page


def test_scores_of_two_workloads():
    found = atlas.scores(
        {
            "one": {"a": 1.0, "b": 2.0, "c": None},
            "two": {"a": 9.0, "b": 3.0, "c": 15.0},
            "three": {"a": None, "b": None},  # nobody reaches it
        }
    )
    # 1 for the fastest, 2/3 at twice its time, 1/3 at three times, 0 from four on.
    assert list(found.items()) == [
        ("b", pytest.approx((2 / 3 + 1) / 2)),
        ("a", pytest.approx((1 + 1 / 3) / 2)),
        ("c", 0.0),
    ]


def test_the_atlas_joins_studies(tmp_path, capsys):
    for name, fast in ("atlas-one", "bmuf --nesterov"), ("atlas-two", "diloco"):
        (tmp_path / name).mkdir()
        report = made_up(labels={fast: "fast"})
        (tmp_path / name / "table.csv").write_text(page.csv(report))
    atlas.main([*map(str, sorted(tmp_path.glob("atlas-*")))])
    head, _, *lines = capsys.readouterr().out.splitlines()
    names = [network.name for network in NETWORKS]
    assert head == f"| algorithm | one | two | sends | score | {' | '.join(names)} |"
    # Five names: a label that one study lacks has not reached its target.
    assert len(lines) == 5
    cells = {x.split("|")[1].strip(" `"): x.split("|") for x in lines}
    assert cells["diloco"][3].strip() == ""
    assert cells["sync_sgd"][4].strip() == "1"
    assert "1 of 5 diverged" in cells["slowmo --slow-momentum 0.95"][2]
