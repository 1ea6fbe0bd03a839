"""`report.summary` as a plain function."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from pydantic import ValidationError

from jobs.summary import SummaryPayload, SummaryResult, build_summary
from thunderagent.jobs.context import Context, Fail
from thunderagent.model.task import Lease, Status, Task


def context(parents: dict[str, Any]) -> Context:
    task = Task(task_id="summary", status=Status.RUNNING, created_at=0.0, submitted_at=0.0, job="report.summary")
    return Context(Lease(task=task, owner="test", fence=1, lease_s=300.0, held_from=0.0), lambda: parents)


def report(month: str, folder: Path, **other: Any) -> dict[str, Any]:
    """The result of a report as the store hands it on: JSON data."""
    values = {"month": month, "path": str(folder / f"report {month}#1.html"), "days": 30, "mean_c": 10.0}
    return values | {"rain_mm": 40.5, "hottest_day": f"{month}-15", "hottest_c": 25.0} | other


def summarize(folder: Path, parents: dict[str, Any], title: str = "A year") -> SummaryResult:
    result = build_summary(context(parents), SummaryPayload(title=title, folder=folder))
    assert isinstance(result, SummaryResult)
    return result


def test_the_totals_weigh_the_months_by_their_days(tmp_path: Path) -> None:
    july, june = report("2012-07", tmp_path, days=31, mean_c=18.0), report("2012-06", tmp_path, days=10, mean_c=8.0)
    result = summarize(tmp_path, {"a": july, "b": june})
    assert (result.reports, result.days, result.mean_c, result.rain_mm) == (2, 41, 15.6, 81.0)
    assert result.path == tmp_path / "summary.html"


def test_the_page_links_every_report_in_the_order_of_months(tmp_path: Path) -> None:
    parents = {name: report(f"2012-{month:02}", tmp_path / "months") for name, month in (("x", 3), ("a", 1), ("m", 2))}
    text = summarize(tmp_path, parents).path.read_text(encoding="utf-8")
    links = [unquote(target) for target in re.findall(r'<a href="([^"]+)"', text)]
    assert links == [f"months/report 2012-0{month}#1.html" for month in (1, 2, 3)]
    assert text.count("<svg") == 2
    assert "<script" not in text


def test_a_parent_without_a_result_is_left_out(tmp_path: Path) -> None:
    result = summarize(tmp_path, {"import": None, "report": report("2012-07", tmp_path)})
    assert result.reports == 1


@pytest.mark.parametrize("parents", [{}, {"import": None}])
def test_nothing_to_sum_up_fails_for_good(tmp_path: Path, parents: dict[str, Any]) -> None:
    answer = build_summary(context(parents), SummaryPayload(title="Empty", folder=tmp_path))
    assert isinstance(answer, Fail)
    assert list(tmp_path.iterdir()) == []


def test_a_parent_that_is_no_report_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValidationError):
        summarize(tmp_path, {"other": {"rows": 5}})


def test_a_second_run_leaves_the_same_bytes_and_nothing_else(tmp_path: Path) -> None:
    parents = {"a": report("2012-07", tmp_path)}
    first = summarize(tmp_path, parents)
    before = first.path.read_bytes()
    assert summarize(tmp_path, parents) == first
    assert first.path.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["summary.html"]


def test_the_title_and_the_paths_are_not_html(tmp_path: Path) -> None:
    evil = report("2012-07", tmp_path, path=str(tmp_path / '"><script>alert(1)</script>.html'))
    text = summarize(tmp_path, {"a": evil}, title="</title><script>alert(2)</script>").path.read_text(encoding="utf-8")
    assert "<script" not in text
    assert "&lt;/title&gt;&lt;script&gt;alert(2)&lt;/script&gt;" in text
