"""Who is woken by a log line finds it on the page about running agents."""

from __future__ import annotations

from pathlib import Path

import pytest

from thunderagent.telemetry.logs import LEVELS

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "operations.md").read_text(encoding="utf-8")
ALARMING = sorted({message for level, message in LEVELS.values() if level in ("WARNING", "ERROR")})


@pytest.mark.parametrize("message", ALARMING)
def test_every_warning_and_error_is_explained(message: str) -> None:
    assert f"`{message.partition(':')[0].partition(';')[0]}" in PAGE
