"""The page about disaster recovery tells the numbers of the code, and its arithmetic is right."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Final

import pytest

from thunderagent.agent.housekeeping import NEW_STREAMS_S
from thunderagent.agent.stream_balance import OTHERS_S
from thunderagent.regions.arbiter import MOST_SWITCHES, SWITCHES_S
from thunderagent.regions.grant import HOLDER_SHARE, REGION_HURRY_S, REGION_LOOK_S, TAKER_SHARE
from thunderagent.regions.hysteresis import Hysteresis
from thunderagent.settings import Settings
from thunderagent.websocket_api.canary.probe import BUDGET_S
from thunderagent.websocket_api.client.options import CONNECTS_A_SECOND, ClientOptions
from thunderagent.websocket_api.protocol import CHANGES_KEPT

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = (ROOT / "docs" / "guides" / "disaster-recovery.md").read_text(encoding="utf-8")
TEMPLATE: Final = (ROOT / "infra" / "failover.yaml").read_text(encoding="utf-8")


def default(name: str) -> float:
    value = Settings.model_fields[name].default
    assert isinstance(value, (int, float))
    return float(value)


LEASE_S: Final = default("region_lease_s")
BEAT_S: Final = default("region_beat_s")
HOLDER_S: Final = LEASE_S * HOLDER_SHARE
TAKER_S: Final = LEASE_S * TAKER_SHARE
CLIENT: Final = ClientOptions()


def rows(heading: str) -> dict[str, str]:
    """The second column of the first table behind a heading, by the first."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    cells = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return {cell[0].strip(): cell[1].strip() for cell in cells}


def of_template(pattern: str) -> float:
    found = re.search(pattern, TEMPLATE, re.DOTALL)
    assert found, pattern
    return float(found[1])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("look", f"{REGION_LOOK_S:g} s"),
        ("beat", f"{BEAT_S:g} s"),
        ("lease", f"{LEASE_S:g} s"),
        ("holder ends", f"{HOLDER_S:g} s"),
        ("taker begins", f"{TAKER_S:g} s"),
        ("margin", f"{TAKER_S - HOLDER_S:g} s"),
        ("canary of an agent", f"{default('canary_s'):g} s"),
        ("budget of a canary", f"{BUDGET_S:g} s"),
        ("down", f"{Hysteresis().down}"),
        ("up", f"{Hysteresis().up}"),
        ("canary of the name", f"{60 * of_template(r'rate.([0-9]+) minute'):g} s"),
        ("time to live", f"{of_template(r'RecordTtl:.*?Default: ([0-9]+)'):g} s"),
        ("backoff", f"{CLIENT.backoff_cap_s:g} s"),
        ("heartbeat", f"{CLIENT.heartbeat_s:g} s"),
        ("connects", f"{CONNECTS_A_SECOND:g}"),
        ("stream connects", f"{default('connect_rate'):g}"),
        ("drain", f"{default('drain_s') + REGION_HURRY_S:g} s"),
    ],
)
def test_each_number_of_the_arithmetic_is_that_of_the_code(name: str, value: str) -> None:
    assert rows("The arithmetic")[name] == value


def clock(seconds: float) -> str:
    minutes, left = divmod(round(seconds), 60)
    return " ".join([f"{minutes} min"] * (minutes > 0) + [f"{left} s"] * (left > 0))


def test_the_arithmetic_is_right() -> None:
    text = " ".join(PAGE.split())
    first, last = TAKER_S - BEAT_S, TAKER_S + 2 * REGION_LOOK_S
    canary_s = Hysteresis().down * (BUDGET_S + default("canary_s"))
    assert f"{first:g} to {last:g} s after the loss" in text
    assert f"= {canary_s:g} s, so {canary_s + last:g} s" in text
    objectives = rows("Objectives")
    assert objectives["the other region's agents work"].startswith(
        f"{clock(last)}; {clock(canary_s + last)} when only the API fails"
    )
    stopped = objectives["the lost region's agents have stopped (cut off, but alive)"]
    assert float(stopped.removesuffix(" s")) >= HOLDER_S + 1, "a thread looks each second"
    periods = of_template(r"AlarmPeriods:.*?Default: ([0-9]+)")
    assert f"two bad minutes are 60 to {60 * periods:g} s; the metric and the alarm take up to 30 s: 150 s" in text
    assert objectives["the name leads to the other region"] == clock(60 * periods + 30)
    ttl_s = of_template(r"RecordTtl:.*?Default: ([0-9]+)")
    assert objectives["all clients are back"] == clock(60 * periods + 30 + ttl_s + CLIENT.backoff_cap_s)
    assert f"{30_000 / CONNECTS_A_SECOND:g} s for 30,000" in text
    streams = default("max_streams")
    assert f"{streams:g} streams take {streams / default('connect_rate'):.0f} s more" in text
    assert f"first sweep, {NEW_STREAMS_S:g} s at most, leave those of others for {OTHERS_S:g} s" in text
    back_s = default("drain_s") + REGION_HURRY_S + TAKER_S
    assert f"{back_s:g} to {back_s + REGION_LOOK_S:g} s in which **no stream runs**" in text


def test_the_drill_judges_by_the_same_objectives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    findings = importlib.import_module("drills.findings")
    objectives = rows("Objectives")
    stopped = objectives["the lost region's agents have stopped (cut off, but alive)"]
    assert stopped == f"{findings.STOP_S:g} s"
    assert objectives["the name leads to the other region"] == clock(findings.SWITCH_S)
    assert objectives["all clients are back"] == clock(findings.CLIENTS_S)


def test_the_drill_goes_by_the_objectives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    findings = importlib.import_module("drills.findings")
    objectives = rows("Objectives")
    assert objectives["the lost region's agents have stopped (cut off, but alive)"] == clock(findings.STOP_S)
    assert objectives["the other region's agents work"].startswith(f"{clock(findings.ACTIVE_S)};")
    assert objectives["all streams live again"] == clock(findings.STREAMS_S)
    assert objectives["the name leads to the other region"] == clock(findings.SWITCH_S)
    assert objectives["all clients are back"] == clock(findings.CLIENTS_S)


def test_what_clients_send_again_is_told_as_it_is() -> None:
    text = " ".join(PAGE.split())
    assert CLIENT.keep_acknowledged_bytes == 1 << 20
    assert f"the last {CLIENT.keep_acknowledged} of each, or 1 MiB" in text
    assert f"younger than {CLIENT.recheck_s:g} s when the region was heard of last" in text
    assert f"with the last {CHANGES_KEPT} changes of each" in text
    assert (MOST_SWITCHES, SWITCHES_S) == (2, 3600.0) and "a third move by itself within an hour" in text


def test_the_page_names_commands_that_there_are() -> None:
    from thunderagent.cli.regions import regions_app

    known = {
        command.name or command.callback.__name__ for command in regions_app.registered_commands if command.callback
    }
    assert set(re.findall(r"thunderagent region ([a-z]+)", PAGE)) <= known
