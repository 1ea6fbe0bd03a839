"""Where weather comes from: a file, an object in S3, or the public sample."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import boto3
from botocore.config import Config

from jobs.weather import COLUMNS


class BadSource(Exception):
    """The source is not a file of daily weather; another try would find the same."""


def rows(source: str) -> Iterator[tuple[int, dict[str, str | None]]]:
    """Line number and content of each row of a CSV file, given as a path or as `s3://bucket/key`.

    Raises:
        BadSource: this is not UTF-8 text, not CSV, or a column is missing.
    """
    try:
        reader = csv.DictReader(io.StringIO(_read(source).decode("utf-8-sig"), newline=""))
        if missing := set(COLUMNS).difference(reader.fieldnames or ()):
            raise BadSource(f"{source} has no column {', '.join(sorted(missing))}")
        for row in reader:
            yield reader.line_num, row
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadSource(f"{source} is not CSV text in UTF-8: {error}") from error


def sample_file() -> Path:
    """The public file of Seattle's weather from 2012 to 2015 that `vega_datasets` ships.

    It is found without an import of that package, which would load pandas.

    Raises:
        FileNotFoundError: the package is not installed.
    """
    found = find_spec("vega_datasets")
    for folder in (found and found.submodule_search_locations) or ():
        if (path := Path(folder, "_data", "seattle-weather.csv")).is_file():
            return path
    raise FileNotFoundError("the sample weather is missing; install with: pip install 'thunderagent[demo]'")


def _read(source: str) -> bytes:
    if not source.startswith("s3://"):
        return Path(source).read_bytes()
    bucket, _, key = source.removeprefix("s3://").partition("/")
    s3 = boto3.client("s3", config=Config(retries={"mode": "standard", "total_max_attempts": 3}))
    return bytes(s3.get_object(Bucket=bucket, Key=key)["Body"].read())
