"""Settings: defaults, the environment, and all problems at once."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from thunderagent.model.errors import ConfigurationError
from thunderagent.model.pacing import Backoff
from thunderagent.settings import LEASE_MARGIN, Settings, lease_problems, load_settings


def problems(**overrides: object) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        load_settings(**overrides)
    first, *rest = str(caught.value).splitlines()
    assert first == "these settings cannot work:"
    assert all(line.startswith("  - ") for line in rest)
    return [line.removeprefix("  - ") for line in rest]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("store", "sqlite:///thunderagent.db"),
        ("queues", {}),
        ("slots", 10),
        ("shards", 1),
        ("lease_s", 300),
        ("heartbeat_s", 60),
        ("poll_min_s", 1),
        ("poll_max_s", 5),
        ("poll_idle_s", 10),
        ("batch_page", 50),
        ("max_retry", 3),
        ("max_crashes", 3),
        ("backoff_base_s", 2),
        ("backoff_cap_s", 300),
        ("drain_s", 30),
        ("sweep_s", 15),
        ("clock_guard_s", 2),
        ("keep_success_days", 14),
        ("keep_failed_days", 90),
        ("blob_bucket", None),
        ("log_level", "INFO"),
        ("log_json", False),
    ],
)
def test_a_default_is_the_one_of_the_design(name: str, value: object) -> None:
    assert getattr(Settings(), name) == value


def test_the_backoff_of_the_settings_is_made_of_their_numbers() -> None:
    assert Settings().backoff == Backoff()
    assert Settings(backoff_base_s=1, backoff_cap_s=7).backoff == Backoff(base_s=1, cap_s=7)


def test_the_holder_stops_a_fifth_of_a_lease_before_its_end() -> None:
    assert LEASE_MARGIN >= 0.2


def test_the_defaults_leave_the_supervisor_time_for_the_drain() -> None:
    assert Settings().drain_s + 5 <= Settings().stop_wait_s


def test_the_environment_sets_what_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THUNDERAGENT_STORE", "sqlite:////var/tasks.db")
    monkeypatch.setenv("THUNDERAGENT_LEASE_S", "90.5")
    monkeypatch.setenv("THUNDERAGENT_HEARTBEAT_S", "30")
    monkeypatch.setenv("THUNDERAGENT_LOG_JSON", "true")
    monkeypatch.setenv("THUNDERAGENT_BLOB_BUCKET", "texts")
    monkeypatch.setenv("THUNDERAGENT_QUEUES", '{"default": 4, "reports": 2}')
    settings = load_settings()
    assert settings.store == "sqlite:////var/tasks.db"
    assert (settings.lease_s, settings.heartbeat_s, settings.log_json) == (90.5, 30.0, True)
    assert settings.blob_bucket == "texts"
    assert settings.queues == {"default": 4, "reports": 2}


def test_an_override_wins_over_the_environment_unless_it_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THUNDERAGENT_SLOTS", "3")
    assert load_settings(slots=5).slots == 5
    assert load_settings(slots=None).slots == 3


def test_all_problems_are_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "SLOTS": "0",
        "SHARDS": "many",
        "LEASE_S": "10",
        "HEARTBEAT_S": "9",
        "POLL_MIN_S": "20",
        "DRAIN_S": "50",
        "LOG_LEVEL": "LOUD",
        "LEASE_SECONDS": "1",
        "QUEUES": '{"reports": 0, "bad name": 1}',
    }.items():
        monkeypatch.setenv(f"THUNDERAGENT_{name}", value)
    found = problems(max_retry=-1)
    text = "\n".join(found)
    assert "there is no setting THUNDERAGENT_LEASE_SECONDS; did you mean THUNDERAGENT_LEASE_S?" in found
    assert "THUNDERAGENT_SLOTS is 0; it must be from 1 to 1000" in found
    assert "THUNDERAGENT_MAX_RETRY is -1; it must be from 0 to 1000" in found
    assert "THUNDERAGENT_SHARDS: Input should be a valid integer" in text
    assert "THUNDERAGENT_HEARTBEAT_S is 9 and THUNDERAGENT_LEASE_S 10; three heartbeats must fit into a lease" in text
    assert "THUNDERAGENT_POLL_MIN_S, POLL_MAX_S and POLL_IDLE_S are 20, 5 and 10; they must not fall" in text
    assert "THUNDERAGENT_DRAIN_S is 50 and THUNDERAGENT_STOP_WAIT_S 45; the supervisor must wait" in text
    assert "THUNDERAGENT_LOG_LEVEL is 'LOUD'; use DEBUG, INFO, WARNING or ERROR" in found
    assert "THUNDERAGENT_QUEUES gives 'reports' 0 slots; it must be from 1 to 1000" in found
    assert "THUNDERAGENT_QUEUES: 'bad name' cannot be the name of a queue" in text
    assert len(found) == 10


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("SLOT", "SLOTS"), ("HEARTBEATS_S", "HEARTBEAT_S"), ("QUEUE", "QUEUES"), ("MAX_RETRIES", "MAX_RETRY")],
)
def test_a_misspelt_variable_is_named_with_the_right_one(
    monkeypatch: pytest.MonkeyPatch, wrong: str, right: str
) -> None:
    monkeypatch.setenv(f"THUNDERAGENT_{wrong}", "1")
    assert problems() == [f"there is no setting THUNDERAGENT_{wrong}; did you mean THUNDERAGENT_{right}?"]


def test_a_variable_that_resembles_nothing_gets_no_suggestion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THUNDERAGENT_XYZZY", "1")
    assert problems() == ["there is no setting THUNDERAGENT_XYZZY"]


def test_queues_that_are_not_json_are_told_with_an_example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THUNDERAGENT_QUEUES", "reports:4")
    [found] = problems()
    assert found.startswith("THUNDERAGENT_QUEUES is not JSON")
    assert '{"default": 10, "reports": 2}' in found


@pytest.mark.parametrize("text", ["reports:4", '"reports"', "", "{"])
def test_queues_that_are_not_json_hide_no_other_problem(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    for name, value in {"QUEUES": text, "SLOTS": "0", "SHARDS": "many", "SLOT": "1"}.items():
        monkeypatch.setenv(f"THUNDERAGENT_{name}", value)
    misspelt, queues, shards, slots = problems()
    assert misspelt.startswith("there is no setting THUNDERAGENT_SLOT;")
    assert queues.startswith("THUNDERAGENT_QUEUES is not JSON")
    assert shards.startswith("THUNDERAGENT_SHARDS: ")
    assert slots.startswith("THUNDERAGENT_SLOTS is 0")


def test_queues_that_are_given_stand_for_those_of_the_environment_that_are_not_json(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("THUNDERAGENT_QUEUES", "reports:4")
    assert load_settings(queues={"a": 1}).queues == {"a": 1}


@pytest.mark.parametrize("name", ["lease_s", "heartbeat_s", "drain_s", "poll_min_s", "sweep_s", "clock_guard_s"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_a_number_that_is_none_is_refused(name: str, value: float) -> None:
    assert any(f"THUNDERAGENT_{name.upper()} is " in problem for problem in problems(**{name: value}))


def test_impossible_settings_do_not_construct_by_any_way() -> None:
    with pytest.raises(ValidationError, match="three heartbeats must fit into a lease"):
        Settings(lease_s=10, heartbeat_s=5)
    with pytest.raises(ValidationError, match="there is no setting"):
        Settings(slotz=1)  # type: ignore[call-arg]


def test_settings_cannot_be_changed_afterwards() -> None:
    with pytest.raises(ValidationError):
        Settings().slots = 3  # type: ignore[misc]


def test_an_error_does_not_show_the_values_of_other_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THUNDERAGENT_STORE", "dynamodb://Secret?region=eu-central-1")
    assert "Secret" not in "\n".join(problems(slots=0))


def test_three_beats_fit_into_a_lease_exactly() -> None:
    assert lease_problems(300, 100, "l", "h") == []
    assert lease_problems(0.6, 0.2, "l", "h") == []
    assert len(lease_problems(300, 100.1, "l", "h")) == 1


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("max_streams", -1, 100_001),
        ("rebalance_streams", -1, 1001),
        ("rebalance_s", 0.05, 86401),
        ("connect_rate", 0.05, 10_001),
        ("connect_concurrency", 0, 10_001),
    ],
)
def test_a_number_for_streams_has_its_bounds(name: str, low: float, high: float) -> None:
    for value in (low, high):
        with pytest.raises(ConfigurationError, match=f"THUNDERAGENT_{name.upper()} is .*; it must be from"):
            load_settings(**{name: value})


def test_the_defaults_for_streams() -> None:
    settings = load_settings()
    assert (settings.max_streams, settings.rebalance_streams, settings.rebalance_s) == (700, 5, 60.0)
    assert (settings.connect_rate, settings.connect_concurrency, settings.event_loop) == (40.0, 16, "asyncio")
    assert load_settings(max_streams=0, rebalance_streams=0).max_streams == 0


def test_an_event_loop_that_is_not_installed_is_told_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigurationError, match="EVENT_LOOP is 'gevent'; use asyncio or uvloop"):
        load_settings(event_loop="gevent")
    monkeypatch.setattr("thunderagent.settings.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"not installed: pip install 'thunderagent\[uvloop\]'"):
        load_settings(event_loop="uvloop")
    assert load_settings().event_loop == "asyncio"


def test_a_wake_queue_that_is_set_to_nothing_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THUNDERAGENT_WAKE_QUEUE_URL", "")
    assert load_settings().wake_queue_url is None


@pytest.mark.parametrize("name", ["AWS/EC2", ":a", "a b", "bücher", "x" * 256])
def test_a_namespace_that_cloudwatch_refuses_is_refused(name: str) -> None:
    [problem] = problems(cloudwatch_namespace=name)
    assert problem.startswith(f"THUNDERAGENT_CLOUDWATCH_NAMESPACE is '{name[:50]}")


@pytest.mark.parametrize(("given", "kept"), [("Shop/Tasks-1.a_b#c:d", "Shop/Tasks-1.a_b#c:d"), ("", None)])
def test_a_namespace_is_taken_and_nothing_is_none(given: str, kept: str | None) -> None:
    assert Settings(cloudwatch_namespace=given).cloudwatch_namespace == kept


@pytest.mark.parametrize(("sweep_s", "least"), [(15.0, 30), (600.0, 30), (5.0, 10), (0.2, 2)])
def test_an_idle_agent_must_not_look_ill(sweep_s: float, least: int) -> None:
    assert load_settings(health_s=least, sweep_s=sweep_s).health_s == least
    [problem] = problems(health_s=least - 0.5, sweep_s=sweep_s)
    assert problem.startswith(f"THUNDERAGENT_HEALTH_S is {least - 0.5:g}; an idle agent asks the store every ")
    assert problem.endswith(f"so use {least} or more")
