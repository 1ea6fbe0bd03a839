"""`report.build` as a plain function."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from pydantic import ValidationError

from jobs.files import file_name
from jobs.report import BadMonth, ReportPayload, ReportResult, build_report
from jobs.weather import month_file
from thunderagent.jobs.context import Context, Snooze
from thunderagent.model.errors import PayloadInvalid, TaskCancelled
from thunderagent.model.task import Lease, Status, Task

HEADER = "date,precipitation,temp_max,temp_min,wind,weather\n"
JULY = (
    HEADER + "2012-07-01,1.5,20.0,10.0,2.0,rain\n2012-07-02,0.0,31.5,12.5,3.0,sun\n2012-07-03,0.5,25.0,15.0,1.0,fog\n"
)


def context(task_id: str = "report-2012-07") -> Context:
    task = Task(task_id=task_id, status=Status.RUNNING, created_at=0.0, submitted_at=0.0, job="report.build")
    return Context(Lease(task=task, owner="test", fence=1, lease_s=300.0, held_from=0.0))


def build(folder: Path, text: str = JULY, ctx: Context | None = None) -> ReportResult:
    month_file(folder, "2012-07").write_text(text, encoding="utf-8")
    result = build_report(ctx or context(), ReportPayload(month="2012-07", folder=folder))
    assert isinstance(result, ReportResult)
    return result


class Page(HTMLParser):
    """What a browser would see: the tags with their attributes, and the text of table cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[str] = []
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open.append(tag)

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "td" and data.strip():
            self.cells.append(data)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def test_the_result_has_the_figures_of_the_month(tmp_path: Path) -> None:
    result = build(tmp_path)
    assert (result.days, result.mean_c, result.rain_mm) == (3, 19.0, 2.0)
    assert (result.hottest_day.isoformat(), result.hottest_c) == ("2012-07-02", 31.5)
    assert result.path == tmp_path / "report-2012-07.html"


def test_the_page_has_two_charts_and_a_row_a_day(tmp_path: Path) -> None:
    page = Page(build(tmp_path).path.read_text(encoding="utf-8"))
    assert (page.count("svg"), page.count("tr"), page.count("circle")) == (2, 4, 6)
    assert page.cells[:5] == ["20.0", "10.0", "1.5", "2.0", "rain"]
    named = [values.get("aria-label") for tag, values in page.tags if tag == "svg"]
    assert named == ["Temperature by day in °C", "Rain by day in mm"]
    ids = [values["id"] for _, values in page.tags if "id" in values]
    assert len(ids) == len(set(ids))


def test_the_page_needs_no_network_and_no_script(tmp_path: Path) -> None:
    text = build(tmp_path).path.read_text(encoding="utf-8")
    page = Page(text)
    assert page.count("script") == page.count("link") == page.count("img") == 0
    assert [values for _, values in page.tags if {"src", "href", "xlink:href"} & values.keys()] == []
    assert set(re.findall(r"https?:[^\"'\s<]+|(?<=[\"'(])//[^\"'\s<]+|@import|url\(", text)) <= {
        "http://www.w3.org/2000/svg"
    }


def test_a_month_that_is_not_there_yet_is_asked_for_later(tmp_path: Path) -> None:
    assert build_report(context(), ReportPayload(month="2012-07", folder=tmp_path)) == Snooze(5)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text",
    ["", HEADER, "not,weather\n1,2\n", HEADER + "2012-08-01,0,1,0,1,sun\n", HEADER + "2012-07-01,x,1,0,1,sun\n"],
)
def test_a_file_that_is_not_this_month_is_fatal(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadMonth):
        build(tmp_path, text)
    assert BadMonth in build_report.fatal
    assert not (tmp_path / "report-2012-07.html").exists()


@pytest.mark.parametrize("month", ["2012-13", "2012-00", "2012-7", "12-07", "../../etc/passwd", "2012-07\n", ""])
def test_a_month_that_is_none_is_refused_at_enqueue(tmp_path: Path, month: str) -> None:
    with pytest.raises(ValidationError):
        ReportPayload(month=month, folder=tmp_path)
    with pytest.raises(PayloadInvalid):
        build_report.load_payload(f'{{"month": "{month}", "folder": "x"}}')


def test_a_second_run_leaves_the_same_bytes_and_nothing_else(tmp_path: Path) -> None:
    first = build(tmp_path)
    before = first.path.read_bytes()
    assert build(tmp_path) == first
    assert first.path.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report-2012-07.html", "weather-2012-07.csv"]


def test_text_of_the_source_is_not_html(tmp_path: Path) -> None:
    attack = "<script>alert(1)</script>"
    text = build(tmp_path, HEADER + f"2012-07-01,0,1,0,1,{attack}\n").path.read_text(encoding="utf-8")
    assert attack not in text
    assert Page(text).count("script") == 0
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text


def test_an_id_cannot_leave_the_folder_or_the_page(tmp_path: Path) -> None:
    result = build(tmp_path, ctx=context('../../<b id="x">'))
    assert result.path.parent == tmp_path
    assert "<b id" not in result.path.read_text(encoding="utf-8")


def test_two_ids_never_share_a_file() -> None:
    ids = ["a/b", "a b", "a_b", "A/b", ".a", "a", "a" * 90, "a" * 91, "ä", "", "."]
    names = [file_name(task_id, ".html") for task_id in ids]
    assert len(set(names)) == len(ids)
    assert all("/" not in name and not name.startswith(".") for name in names)


def test_a_cancelled_task_writes_nothing(tmp_path: Path) -> None:
    ctx = context()
    ctx.stop(TaskCancelled())
    with pytest.raises(TaskCancelled):
        build(tmp_path, ctx=ctx)
    assert not (tmp_path / "report-2012-07.html").exists()
