"""The matrix of other projects: its table, its verdicts, and absent projects."""

import re
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from support.commands import ROOT

from conformance import matrix
from conformance.adapters.rows import AgreementRow, Cause, Project, add_checkout
from conformance.check import read

PAGE = (ROOT / "docs" / "conformance.md").read_text("utf-8")
ADAPTERS = ROOT / "conformance" / "adapters"
SHARED = {"__init__", "local_steps", "processes", "rows", "torch_models"}
FAULT = Cause("fault", "the anchor moves", "anchor.py")


def make_path(vectors):
    """Returns the params of a file, (steps, workers, size)."""
    size = vectors["workers"], len(vectors["start"])
    rows = [np.broadcast_to(row["params"], size) for row in vectors["steps"]]
    return np.array(rows)


def make_project(run, **options):
    row = AgreementRow("Averager", "model_averaging", run, **options)
    return Project("Made up", "1.0", [row]), row


def test_the_page_and_the_table_are_those_of_the_records():
    records = matrix.read_records()
    assert matrix.fill_page(PAGE, records) == PAGE
    assert matrix.TABLE.read_text("utf-8") == matrix.format_table(records)


def test_the_page_has_each_fault_once_and_links_to_its_program():
    records = [x for x in matrix.read_records() if x["verdict"] == "fault"]
    faults = matrix.format_faults(records).splitlines()[2:]
    assert len(faults) == len({*faults}) < len(records)
    for record in records:
        program = f"](../conformance/repros/{record['reproduction']})"
        assert any(record["project"] in x and program in x for x in faults), record


def test_every_adapter_is_of_one_environment_that_has_requirements():
    files = {path.stem for path in ADAPTERS.glob("*.py")} - SHARED
    assert sorted(files) == sorted(matrix.ADAPTERS)
    requirements = (ROOT / "conformance" / "requirements").glob("*.txt")
    assert {path.stem for path in requirements} == {*matrix.ENVIRONMENTS}


def test_the_records_have_rows_of_many_projects_and_files_that_exist():
    records = matrix.read_records()
    assert len(records) >= 30
    assert len({record["project"] for record in records}) >= 12
    for record in records:
        assert read(record["file"])["workers"]
        assert record["verdict"] != "fault" or record["reproduction"], record


def test_each_reproduction_exists_and_is_named_by_a_record():
    programs = {path.name for path in (ROOT / "conformance" / "repros").glob("*.py")}
    named_programs = {
        record.get("reproduction", "") for record in matrix.read_records()
    }
    assert named_programs - {""} == programs


def test_each_reproduction_that_an_adapter_names_has_been_recorded():
    """Adapters are read as text, as their projects are not installed."""
    recorded = {
        record["reproduction"] for record in matrix.read_records() if "reason" in record
    }
    for path in ADAPTERS.glob("*.py"):
        for name in re.findall(r'"(\w+\.py)"', path.read_text("utf-8")):
            assert name in recorded, path.name


class VerdictCase(NamedTuple):
    """A row of the matrix, and its verdict.

    Attributes:
        verdict: what the matrix says.
        offset: the difference from the file's params.
        help_text: what the row's adapter helps with.
        cause: the known cause of a difference.
    """

    verdict: str
    offset: float
    help_text: str = ""
    cause: Cause | None = None


VERDICTS = [
    VerdictCase("agrees", offset=0.0),
    VerdictCase("agrees", offset=0.0, cause=FAULT),
    VerdictCase("agrees with help", offset=0.0, help_text="a counter"),
    VerdictCase("undecided", offset=1e-3),
    VerdictCase("fault", offset=1e-3, help_text="a counter", cause=FAULT),
    VerdictCase(
        "differs by choice",
        offset=1e-3,
        cause=Cause("differs by choice", "documented"),
    ),
    VerdictCase("undecided", offset=np.nan),
]


@pytest.mark.parametrize("case", VERDICTS, ids=lambda case: case.verdict)
def test_a_verdict_follows_from_the_difference_the_help_and_the_cause(case):
    project, row = make_project(
        lambda vectors: make_path(vectors) + case.offset,
        help=case.help_text,
        cause=case.cause,
    )
    assert matrix.run_row(project, row)["verdict"] == case.verdict


def test_figures_have_the_first_difference_and_those_after_later_syncs():
    vectors = read("model_averaging")  # syncs after steps 3, 7 and 11
    path = make_path(vectors).copy()
    path[5, 2, 0] += 0.25
    path[7:, :, 1] += 0.5
    path[11, 3, 1] += 0.5
    figures = matrix.measure_difference(vectors, path, 1e-9)
    assert (figures["first_step"], figures["sizes"]) == (5, [0.5, 1.0])
    assert figures["first_size"] == pytest.approx(0.25)
    assert figures["equal"] is False
    assert matrix.format_difference(figures) == "step 5: 0.25; then 0.5, 1"


def test_workers_that_agree_after_syncs_are_equal_though_they_differ_from_the_file():
    vectors = read("model_averaging")
    assert (
        matrix.measure_difference(vectors, make_path(vectors) + 1.0, 1e-9)["equal"]
        is True
    )


def test_an_error_of_an_implementation_is_its_difference():
    def run(vectors):
        raise IndexError("tuple index out of range\nmore")

    record = matrix.run_row(
        *make_project(run, cause=FAULT._replace(error="IndexError"))
    )
    assert record["verdict"] == "fault"
    assert matrix.format_difference(record) == "IndexError: tuple index out of range"


@pytest.mark.parametrize("error", ["", "TypeError"])
def test_an_error_other_than_that_of_the_cause_is_undecided(error):
    def run(vectors):
        raise RuntimeError("Address already in use")

    record = matrix.run_row(*make_project(run, cause=FAULT._replace(error=error)))
    assert record["verdict"] == "undecided"
    assert "reason" not in record


def test_params_of_another_shape_are_an_error():
    record = matrix.run_row(*make_project(lambda vectors: np.zeros((14, 1, 21))))
    assert (
        record["error"]
        == "ValueError: params have the shape (14, 1, 21), not (14, 4, 21)"
    )


def test_a_project_that_cannot_be_imported_is_named_and_keeps_its_records(
    monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, "fairscale", None)
    monkeypatch.delitem(sys.modules, "conformance.adapters.fairscale_slowmo", False)
    old_records = matrix.RECORDS.read_bytes()
    assert matrix.main(["fairscale_slowmo"]) == 0
    assert (
        "fairscale_slowmo: not run here: ModuleNotFoundError" in capsys.readouterr().out
    )
    assert matrix.RECORDS.read_bytes() == old_records
    assert matrix.main(["fairscale_slowmo", "--check"]) == 1


def test_a_checkout_that_is_not_there_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("CONFORMANCE_SOURCES", str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="no checkout gym in --sources"):
        add_checkout("gym")


def test_an_unknown_adapter_is_refused_with_the_choices(capsys):
    with pytest.raises(SystemExit, match="2"):
        matrix.main(["fairscale"])
    assert "no adapter fairscale: choose from " in capsys.readouterr().err


def test_a_run_replaces_the_records_of_its_project_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(matrix, "RECORDS", Path(tmp_path / "matrix.jsonl"))
    monkeypatch.setattr(matrix, "PAGE", Path(tmp_path / "page.md"))
    monkeypatch.setattr(matrix, "TABLE", Path(tmp_path / "matrix.csv"))
    matrix.PAGE.write_text("before\n<!-- matrix -->\n<!-- end -->\nafter\n", "utf-8")
    monkeypatch.setattr(matrix, "ADAPTERS", ["one", "two"])
    projects = {
        name: (make_project(make_path)[0]._replace(name=name), "")
        for name in ("one", "two")
    }
    monkeypatch.setattr(matrix, "load_project", projects.__getitem__)
    assert matrix.main([]) == 0
    first_record, second_record = matrix.read_records()
    projects["two"] = (projects["two"][0]._replace(version="2.0"), "")
    assert matrix.main(["two"]) == 0
    assert matrix.read_records() == [first_record, second_record | {"version": "2.0"}]
    page = matrix.PAGE.read_text("utf-8")
    assert page.startswith("before\n<!-- matrix -->\n2 rows of 2 projects: 2 agrees.\n")
    assert page.endswith("<!-- end -->\nafter\n")
    assert len(matrix.TABLE.read_text("utf-8").splitlines()) == 3


def test_a_changed_verdict_is_a_line_and_an_end_with_1_under_check(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(matrix, "RECORDS", Path(tmp_path / "matrix.jsonl"))
    monkeypatch.setattr(matrix, "ADAPTERS", ["one"])
    project = make_project(make_path)[0]
    monkeypatch.setattr(matrix, "load_project", lambda name: (project, ""))
    assert matrix.main(["--check"]) == 1
    assert (
        "Averager | model_averaging: agrees, before: not recorded"
        in capsys.readouterr().out
    )
    assert not matrix.RECORDS.exists()
