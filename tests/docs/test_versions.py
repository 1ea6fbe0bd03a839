"""The page on versions of jobs has code that does what it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from thunderagent.jobs.job import Job

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "versions.md").read_text()


def test_the_job_of_the_page_takes_both_payloads_of_the_page() -> None:
    [block] = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    names: dict[str, Any] = {"__name__": __name__}
    exec(compile(block, "docs/guides/versions.md", "exec"), names)  # noqa: S102 - the page is ours
    job: Job[Any] = names["build_report"]
    assert job.job_values == ("report.build", "report.build@2")
    old, new = re.findall(r"put by version (?:1|2), `({.*?})`", PAGE)
    assert job.load_payload(old, 1) == job.load_payload(new, 2)
