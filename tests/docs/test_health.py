"""The page about health: every reason has its remedy there, and what it shows is what an agent writes."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Final

from thunderagent.agent.health import judgement
from thunderagent.agent.health.file import HealthFile
from thunderagent.agent.health.judgement import Health
from thunderagent.agent.health.probes import PORTS
from thunderagent.settings import PREFIX, Settings

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = (ROOT / "docs" / "guides" / "health.md").read_text(encoding="utf-8")


def names_of_reasons() -> set[str]:
    """The first argument of each `Reason(...)`, without the queue that follows the colon."""
    tree = ast.parse(Path(judgement.__file__).read_text(encoding="utf-8"))
    calls = [one for one in ast.walk(tree) if isinstance(one, ast.Call) and ast.unparse(one.func) == "Reason"]
    return {ast.unparse(one.args[0]).lstrip("f").strip("'\"").partition(":")[0] for one in calls}


def test_every_reason_stands_on_the_page_with_its_remedy() -> None:
    rows = set(re.findall(r"^\| `([a-z-]+)` \|.*\|.*\|.+\|$", PAGE, flags=re.MULTILINE))
    assert names_of_reasons() <= rows
    assert len(names_of_reasons()) == 10


def test_every_setting_on_the_page_is_one() -> None:
    assert {name.lower() for name in re.findall(rf"{PREFIX}([A-Z0-9_]+)", PAGE)} <= set(Settings.model_fields)


def test_the_file_on_the_page_has_the_facts_of_a_real_one(tmp_path: Path) -> None:
    [shown] = re.findall(r"```json\n(.*?)```", PAGE, flags=re.DOTALL)
    file = HealthFile(str(tmp_path), now=lambda: 0.0)
    facts = {"agent": "me", "ready": True, **Health(healthy=True, alive=True).entry(), "http": None}
    file.write(facts, every_s=1.0)
    assert list(json.loads(shown)) == list(json.loads(file.path.read_text()))


def test_the_numbers_on_the_page_are_those_of_the_code() -> None:
    assert f"next free one of {PORTS}" in PAGE
    assert f"for {judgement.WEDGED_S:g} s and `WatchdogSec`" in PAGE
    assert f"`THUNDERAGENT_HEALTH_S` ({Settings().health_s:g})" in PAGE
