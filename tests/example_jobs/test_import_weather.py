"""`weather.import` as a plain function, on files and on S3."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import boto3
import pytest
from moto import mock_aws
from pydantic import ValidationError

from jobs.import_weather import ImportPayload, import_weather
from jobs.source import BadSource, sample_file
from jobs.weather import Day, month_file, read_month
from thunderagent.jobs.context import Context
from thunderagent.model.errors import TaskCancelled
from thunderagent.model.task import Lease, Status, Task

HEADER = "date,precipitation,temp_max,temp_min,wind,weather\n"


def context(task_id: str = "import") -> Context:
    task = Task(task_id=task_id, status=Status.RUNNING, created_at=0.0, submitted_at=0.0, job="weather.import")
    return Context(Lease(task=task, owner="test", fence=1, lease_s=300.0, held_from=0.0))


def days(month: str, count: int) -> str:
    return "".join(f"{month}/{day:02},0.5,20.0,10.0,3.0,sun\n" for day in range(1, count + 1))


def run(folder: Path, text: str, ctx: Context | None = None) -> tuple[int, list[str], int, list[str]]:
    source = folder / "source.csv"
    source.write_text(text, encoding="utf-8")
    result = import_weather(ctx or context(), ImportPayload(source=str(source), folder=folder / "clean"))
    return result.rows, result.months, result.skipped, result.problems


def test_the_public_sample_gives_48_whole_months(tmp_path: Path) -> None:
    ctx = context()
    result = import_weather(ctx, ImportPayload(source=str(sample_file()), folder=tmp_path))
    assert (result.rows, len(result.months), result.skipped) == (1461, 48, 0)
    assert (result.months[0], result.months[-1]) == ("2012-01", "2015-12")
    assert [day.date.day for day in read_month(tmp_path, "2012-02")] == list(range(1, 30))
    first = read_month(tmp_path, "2012-01")[0]
    assert (first.high_c, first.low_c, first.wind_ms, first.weather) == (12.8, 5.0, 4.7, "drizzle")
    assert ctx.take_progress() == '{"step":"write","month":"2015-12","months":48}'


@pytest.mark.slow
def test_the_sample_is_found_without_pandas() -> None:
    code = "import sys, jobs.source as s; assert s.sample_file().is_file(); sys.exit('pandas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False).returncode == 0


def test_a_second_run_leaves_the_same_bytes_and_nothing_else(tmp_path: Path) -> None:
    text = HEADER + days("2024/01", 31) + days("2024/02", 29)
    first = run(tmp_path, text)
    before = {path.name: path.read_bytes() for path in (tmp_path / "clean").iterdir()}
    assert run(tmp_path, text) == first == (60, ["2024-01", "2024-02"], 0, [])
    assert {path.name: path.read_bytes() for path in (tmp_path / "clean").iterdir()} == before
    assert sorted(before) == ["weather-2024-01.csv", "weather-2024-02.csv"]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("2024/02/30,0,1,0,1,sun", "day is out of range"),
        ("yesterday,0,1,0,1,sun", "Invalid isoformat string"),
        ("2024/03/01,,1,0,1,sun", "precipitation is '', not a number"),
        ("2024/03/01,0,warm,0,1,sun", "temp_max is 'warm', not a number"),
        ("2024/03/01,0,nan,0,1,sun", "temp_max is 'nan', not a number"),
        ("2024/03/01,0,inf,0,1,sun", "temp_max is 'inf', not a number"),
        ("2024/03/01,0,1,2,1,sun", "temp_max 1 is under temp_min 2"),
        ("2024/03/01,-1,1,0,1,sun", "cannot be negative"),
        ("2024/03/01,0,1,0,-1,sun", "cannot be negative"),
        ("2024/03/01,0,1,0,1,", "weather is empty"),
        ("2024/03/01,0,1", "temp_min is '', not a number"),
        ("2024/01/01,0,1,0,1,sun", "2024-01-01 is there twice"),
    ],
)
def test_a_bad_row_is_left_out_and_told_with_its_line(tmp_path: Path, row: str, why: str) -> None:
    rows, months, skipped, problems = run(tmp_path, HEADER + days("2024/01", 31) + row + "\n" + days("2024/02", 29))
    assert (rows, months, skipped) == (60, ["2024-01", "2024-02"], 1)
    assert problems[0].startswith("line 33: ")
    assert why in problems[0]


def test_too_many_bad_rows_are_fatal_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(BadSource, match="3 of 34 rows are bad: line 33: "):
        run(tmp_path, HEADER + days("2024/01", 31) + "x\n" * 3)
    assert not (tmp_path / "clean").exists()
    assert BadSource in import_weather.fatal


@pytest.mark.parametrize("text", ["", HEADER, "a,b\n1,2\n"])
def test_a_file_that_is_no_weather_is_fatal(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadSource):
        run(tmp_path, text)


def test_bytes_that_are_no_text_are_fatal(tmp_path: Path) -> None:
    (tmp_path / "picture").write_bytes(b"\x89PNG\xff")
    with pytest.raises(BadSource, match="UTF-8"):
        import_weather(context(), ImportPayload(source=str(tmp_path / "picture"), folder=tmp_path))


def test_a_missing_file_is_an_error_that_a_retry_may_cure(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        import_weather(context(), ImportPayload(source=str(tmp_path / "later.csv"), folder=tmp_path))
    assert not issubclass(FileNotFoundError, import_weather.fatal)


def test_a_cancelled_task_stops_before_it_writes(tmp_path: Path) -> None:
    ctx = context()
    ctx.stop(TaskCancelled())
    with pytest.raises(TaskCancelled):
        run(tmp_path, HEADER + days("2024/01", 31), ctx)
    assert not (tmp_path / "clean").exists()


def test_a_failed_write_leaves_the_old_file_and_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, HEADER + days("2024/01", 31))
    old = month_file(tmp_path / "clean", "2024-01").read_bytes()

    def full(descriptor: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("jobs.files.os.fsync", full)
    with pytest.raises(OSError, match="no space left"):
        run(tmp_path, HEADER + days("2024/01", 30))
    assert [path.read_bytes() for path in (tmp_path / "clean").iterdir()] == [old]


@pytest.mark.slow
def test_the_source_may_be_an_object_in_s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    with mock_aws():
        s3 = boto3.client("s3")
        s3.create_bucket(Bucket="weather")
        s3.put_object(Bucket="weather", Key="raw/daily.csv", Body=(HEADER + days("2024/01", 31)).encode())
        result = import_weather(context(), ImportPayload(source="s3://weather/raw/daily.csv", folder=tmp_path))
    assert result.rows == len(read_month(tmp_path, "2024-01")) == 31


def test_the_payload_must_name_source_and_folder() -> None:
    with pytest.raises(ValidationError):
        ImportPayload.model_validate({"source": "x.csv"})


def test_a_day_knows_its_mean() -> None:
    row = {"date": "2024-01-01", "precipitation": "0", "temp_max": "5", "temp_min": "-2"}
    assert Day.from_row(row | {"wind": "1", "weather": "snow"}).mean_c == 1.5
