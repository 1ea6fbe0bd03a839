"""Settings from the environment (`THUNDERAGENT_*`), each with its unit in its name, checked all at once.

Settings that cannot work together do not construct: the error lists every problem, not the first.
"""

from __future__ import annotations

import difflib
import ipaddress
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from thunderagent.model.canary_targets import canary_problems
from thunderagent.model.errors import ConfigurationError
from thunderagent.model.pacing import Backoff
from thunderagent.model.task import Lane

PREFIX = "THUNDERAGENT_"
_OPTIONAL: Final = (
    "wake_queue_url",
    "blob_bucket",
    "cloudwatch_namespace",
    "health_folder",
    "region",
    "region_arbiter",
    "region_preferred",
    "canary_token_from",
)
LEASE_MARGIN = 0.2
"""Share of a lease before whose end the holder stops by itself."""


@dataclass(frozen=True, slots=True)
class _Within:
    """The bounds of a number."""

    low: float
    high: float


class _Environment(EnvSettingsSource):
    """The variables; a text that is not JSON where JSON belongs passes, to be listed with all other problems."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        try:
            return super().decode_complex_value(field_name, field, value)
        except ValueError:
            return value


class Settings(BaseSettings):
    """All settings with their defaults."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
    )

    store: str = "sqlite:///thunderagent.db"
    """Where the tasks are: `sqlite:///FILE` or `dynamodb://TABLE?region=…&endpoint=…`."""
    queues: dict[str, int] = Field(default_factory=dict)
    """Queues that the agent serves with the slots of each, as JSON; empty: every queue that its jobs name."""
    slots: Annotated[int, _Within(1, 1000)] = 10
    """Tasks that run at the same time in a queue for which no number is given."""
    shards: Annotated[int, _Within(1, 64)] = 1
    """Parts of each queue's index partition, 1 to 64; more for over 500 tasks a second on DynamoDB."""
    max_streams: Annotated[int, _Within(0, 100_000)] = 700
    """Streams that the agent holds at most, beside the slots of its queues; 0: none."""
    rebalance_streams: Annotated[int, _Within(0, 1000)] = 5
    """Streams that an agent well above the mean of the fleet hands off in one turn; 0: none."""
    rebalance_s: Annotated[float, _Within(0.1, 86400)] = 60.0
    """Time between two such turns. At least 15 s: agents report as often how many streams they hold."""
    connect_rate: Annotated[float, _Within(0.1, 10_000)] = 40.0
    """Connections that the agent's streams open in a second."""
    connect_concurrency: Annotated[int, _Within(1, 10_000)] = 16
    """Connections to one peer that the agent's streams are opening at one moment."""
    event_loop: str = "asyncio"
    """`asyncio` or `uvloop`, for coroutine functions and streams; uvloop needs a fifth of the memory with TLS."""
    lease_s: Annotated[float, _Within(0.5, 43200)] = 300.0
    """How long a task stays with a silent agent before another one takes it."""
    heartbeat_s: Annotated[float, _Within(0.05, 14400)] = 60.0
    """Time between two renewals of a lease; at most a third of it."""
    poll_min_s: Annotated[float, _Within(0.01, 3600)] = 1.0
    """Pause between polls after one that found less than a page."""
    poll_max_s: Annotated[float, _Within(0.01, 3600)] = 5.0
    """Longest pause between polls while the queue is empty."""
    poll_idle_s: Annotated[float, _Within(0.01, 3600)] = 10.0
    """Pause between polls when the queue has been empty for five minutes."""
    wake_queue_url: str | None = None
    """Amazon SQS queue that notifies agents of new tasks, with DynamoDB; SQLite needs none. One for each table."""
    poll_wake_s: Annotated[float, _Within(0.01, 3600)] = 60.0
    """Longest pause between polls while that queue works and is empty."""
    batch_page: Annotated[int, _Within(1, 1000)] = 50
    """Least number of index entries that a poll reads when several agents serve the queue, 1 to 1000."""
    max_retry: Annotated[int, _Within(0, 1000)] = 3
    """Retries after handler errors, where neither job nor task has a number."""
    max_crashes: Annotated[int, _Within(0, 1000)] = 3
    """Lost agents that a task survives; one more that ran nothing else makes it FAILED."""
    backoff_base_s: Annotated[float, _Within(0, 86400)] = 2.0
    """Upper end of the random delay before the first retry; doubles with each."""
    backoff_cap_s: Annotated[float, _Within(0, 604800)] = 300.0
    """Upper end of the random delay before any retry."""
    drain_s: Annotated[float, _Within(0, 86400)] = 30.0
    """How long running tasks may take to end after SIGTERM."""
    stop_wait_s: Annotated[float, _Within(1, 90000)] = 45.0
    """The `stopwaitsecs` of the supervisor that runs the agent; must be over `drain_s` by 5 s or more."""
    sweep_s: Annotated[float, _Within(0.1, 3600)] = 15.0
    """Time between two sweeps for lost agents' tasks and stuck dependencies. With streams, 5 s at most for tasks."""
    clock_guard_s: Annotated[float, _Within(0, 60)] = 2.0
    """Added to a lease before another agent takes the task."""
    keep_success_days: Annotated[float, _Within(0.001, 3650)] = 14.0
    """Days until a task that is SUCCESS or DONE (closed on purpose) is deleted."""
    keep_failed_days: Annotated[float, _Within(0.001, 3650)] = 90.0
    """Days until a task that is FAILED is deleted."""
    blob_bucket: str | None = None
    """S3 bucket for payloads and results over 350 KB; without one they are refused."""
    log_level: str = "INFO"
    """Least level of the log lines: DEBUG, INFO, WARNING or ERROR."""
    log_json: bool = False
    """One JSON object a log line instead of text."""
    log_redact: str = ""
    """Names of facts that no log line shows, with commas between, beside `password`, `token` and the like."""
    cloudwatch_namespace: str | None = None
    """Namespace of the metrics that agents send to Amazon CloudWatch once a minute; without one they send none."""
    push_endpoint: str | None = None
    """Management API of the WebSocket API for `ctx.push`: `https://API.execute-api.REGION.amazonaws.com/STAGE`."""
    push_connections: str | None = None
    """URL of its table of connections: `dynamodb://TABLE?region=REGION`."""
    http_port: Annotated[int, _Within(0, 65535)] = 0
    """Port of an agent's `/metrics` and `/health`, the next free one of 32 if it is taken; 0: none."""
    http_host: str = "127.0.0.1"
    """Address of that port. Everything that reaches it may read the metrics."""
    traces: bool = False
    """Make OpenTelemetry spans of enqueues and runs, sent as `OTEL_…` variables say; needs the extra `traces`."""
    health_folder: str | None = None
    """Folder in which each agent keeps a file `PID.json` with its health."""
    health_s: Annotated[float, _Within(1, 86400)] = 60.0
    """How long store, heartbeat, loop or event loop may stand still before an agent is not healthy."""
    recycle_tasks: Annotated[int, _Within(0, 1e9)] = 0
    """Tasks after which an agent drains, for its supervisor to start a fresh one; 0: never."""
    recycle_mib: Annotated[int, _Within(0, 1e6)] = 0
    """Resident memory in MiB above which an agent drains; 0: never."""
    recycle_threads: Annotated[int, _Within(0, 1000)] = 3
    """Handlers that go on a minute after they were asked to stop, at which an agent drains; 0: never."""
    ec2_notices: bool = False
    """Ask the EC2 instance each 5 s whether it will be taken away (spot, Auto Scaling), and drain then."""

    region: str | None = None
    """Region in which the agent runs, such as `eu-central-1`; needed where several share a global table."""
    region_arbiter: str | None = None
    """Store with the row of the grant: a table in a third region. Empty: there is one region."""
    region_scope: str = "default"
    """Name of that row: agents that share a global table have the same."""
    region_lease_s: Annotated[float, _Within(0.5, 3600)] = 30.0
    """How long a silent region keeps its grant."""
    region_beat_s: Annotated[float, _Within(0.05, 1200)] = 10.0
    """Time between two renewals of the grant; at most a third of it."""
    region_preferred: str | None = None
    """Region that has the grant first, and may get it back."""
    region_failback: str = "manual"
    """`manual`, or `auto`: the preferred region takes the grant back when it has been well for a while."""

    canary_targets: dict[str, str] = Field(default_factory=dict)
    """WebSocket APIs that agents try by region, as JSON: `{"eu-central-1": "wss://…"}`; empty: no canary."""
    canary_token_from: str | None = None
    """Their token: `file:///PATH`, `env:NAME`, `command:PROGRAM`, or `secret:NAME` of Secrets Manager."""
    canary_s: Annotated[float, _Within(0.05, 600)] = 30.0
    """Time between two attempts of an agent at the API of its own region."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """What is given in the call, then the environment."""
        return init_settings, _Environment(settings_cls)

    @property
    def backoff(self) -> Backoff:
        return Backoff(base_s=self.backoff_base_s, cap_s=self.backoff_cap_s)

    @model_validator(mode="wrap")
    @classmethod
    def _check_together(cls, data: Any, handler: ValidatorFunctionWrapHandler) -> Settings:
        """Check each value and what must hold between them, and list all problems in one error."""
        problems: list[str] = []
        given = dict(data) if isinstance(data, Mapping) else {}
        if empty := {name: None for name in _OPTIONAL if given.get(name) == ""}:  # set to nothing is not set
            data = given = {**given, **empty}
        for name, example in _JSON.items():
            if isinstance(text := given.get(name), str):
                problems.append(_json_problem(name, text, example))
                data = given = {**given, name: {}}
        try:
            settings: Settings = handler(data)
        except ValidationError as error:
            for problem in error.errors():
                name = str(problem["loc"][0]) if problem["loc"] else "?"
                problems.append(_name_problem(name) or f"{PREFIX}{name.upper()}: {problem['msg']}")
                given.pop(name, None)
            settings = handler(given)
        problems += settings._problems()
        if problems:
            listing = "\n".join(f"  - {problem}" for problem in problems)
            raise PydanticCustomError("settings", "{listing}", {"listing": listing})
        return settings

    def _problems(self) -> list[str]:
        problems = [
            f"{PREFIX}{name.upper()} is {value:g}; it must be from {bound.low:g} to {bound.high:g}"
            for name, field in type(self).model_fields.items()
            for bound in field.metadata
            if isinstance(bound, _Within) and not bound.low <= (value := getattr(self, name)) <= bound.high
        ]
        problems += [
            f"{PREFIX}QUEUES gives {queue!r} {slots} slots; it must be from 1 to 1000"
            for queue, slots in self.queues.items()
            if not 1 <= slots <= 1000
        ]
        for queue in self.queues:
            try:
                Lane(queue)
            except ConfigurationError as error:
                problems.append(f"{PREFIX}QUEUES: {error}")
        problems += lease_problems(self.lease_s, self.heartbeat_s, f"{PREFIX}LEASE_S", f"{PREFIX}HEARTBEAT_S")
        if not self.poll_min_s <= self.poll_max_s <= self.poll_idle_s:
            problems.append(
                f"{PREFIX}POLL_MIN_S, POLL_MAX_S and POLL_IDLE_S are {self.poll_min_s:g}, {self.poll_max_s:g} and "
                f"{self.poll_idle_s:g}; they must not fall"
            )
        problems += self._region_problems()
        problems += canary_problems(self.canary_targets, self.canary_token_from, PREFIX)
        if self.wake_queue_url is not None and (problem := queue_problem(self.wake_queue_url)):
            problems.append(f"{PREFIX}WAKE_QUEUE_URL {problem}")
        if self.cloudwatch_namespace is not None and (problem := namespace_problem(self.cloudwatch_namespace)):
            problems.append(f"{PREFIX}CLOUDWATCH_NAMESPACE {problem}")
        if self.push_endpoint is not None and (problem := push_problem(self.push_endpoint)):
            problems.append(f"{PREFIX}PUSH_ENDPOINT {problem}")
        if (self.push_endpoint is None) != (self.push_connections is None):
            problems.append(f"{PREFIX}PUSH_ENDPOINT and {PREFIX}PUSH_CONNECTIONS go together: set both, or none")
        if self.drain_s + 5 > self.stop_wait_s:
            problems.append(
                f"{PREFIX}DRAIN_S is {self.drain_s:g} and {PREFIX}STOP_WAIT_S {self.stop_wait_s:g}; the supervisor "
                "must wait at least 5 s longer than the drain, or it kills the agent in the middle of it"
            )
        if self.health_s < (least := 2 * min(15.0, max(1.0, self.sweep_s))):
            problems.append(
                f"{PREFIX}HEALTH_S is {self.health_s:g}; an idle agent asks the store every {least / 2:g} s (its row, "
                f"{PREFIX}SWEEP_S), so use {least:g} or more"
            )
        if self.event_loop not in ("asyncio", "uvloop"):
            problems.append(f"{PREFIX}EVENT_LOOP is {self.event_loop!r}; use asyncio or uvloop")
        elif self.event_loop == "uvloop" and find_spec("uvloop") is None:
            problems.append(f"{PREFIX}EVENT_LOOP is uvloop, which is not installed: pip install 'thunderagent[uvloop]'")
        if self.traces and not (has_package("opentelemetry.sdk") and has_package("opentelemetry.exporter.otlp")):
            problems.append(f"{PREFIX}TRACES needs OpenTelemetry: pip install 'thunderagent[traces]'")
        if self.log_level.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
            problems.append(f"{PREFIX}LOG_LEVEL is {self.log_level!r}; use DEBUG, INFO, WARNING or ERROR")
        return problems

    def _region_problems(self) -> list[str]:
        problems = [
            f"{PREFIX}{name.upper()} is {value!r:.80}; use 1 to 64 letters, digits and . - _"
            for name in ("region", "region_scope", "region_preferred")
            if (value := getattr(self, name)) is not None and not _REGION.fullmatch(value)
        ]
        if self.region_failback not in ("manual", "auto"):
            problems.append(f"{PREFIX}REGION_FAILBACK is {self.region_failback!r}; use manual or auto")
        elif self.region_failback == "auto" and self.region_preferred is None:
            problems.append(f"{PREFIX}REGION_FAILBACK is auto: set {PREFIX}REGION_PREFERRED, the region to go back to")
        if self.region_arbiter is None:
            return problems
        if self.region is None:
            problems.append(f"{PREFIX}REGION_ARBITER is set: set {PREFIX}REGION too, such as eu-central-1")
        if self.region_arbiter.partition("?")[0] == self.store.partition("?")[0]:  # wherever: a copy
            problems.append(
                f"{PREFIX}REGION_ARBITER is {PREFIX}STORE: a grant must not be replicated, so use a table of its own, "
                "in a third region (infra/control.yaml)"
            )
        beat, lease = f"{PREFIX}REGION_BEAT_S", f"{PREFIX}REGION_LEASE_S"
        return problems + lease_problems(self.region_lease_s, self.region_beat_s, lease, beat)


_REGION: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")


def has_package(name: str) -> bool:
    """Whether a package is installed, without importing it."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


_JSON: Final = {"queues": '{"default": 10, "reports": 2}', "canary_targets": '{"eu-central-1": "wss://ws.example.com"}'}
"""Settings that are JSON, with an example."""


def _json_problem(name: str, text: str, example: str) -> str:
    try:
        json.loads(text)
        why = "a text"
    except ValueError as error:
        why = str(error)
    return f"{PREFIX}{name.upper()} is not JSON ({why}); write for example {example}"


def lease_problems(lease_s: float, heartbeat_s: float, lease_name: str, heartbeat_name: str) -> list[str]:
    """Problems of a lease and its heartbeat: three beats must fit into a lease."""
    if heartbeat_s * 3 <= lease_s * (1 + 1e-9):  # 0.2 * 3 is over 0.6 in binary
        return []
    return [
        f"{heartbeat_name} is {heartbeat_s:g} and {lease_name} {lease_s:g}; three heartbeats must fit into a lease, "
        f"so use {heartbeat_name} of at most {lease_s / 3:g}"
    ]


def load_settings(**overrides: Any) -> Settings:
    """The settings of the environment, with overrides that are not None.

    Raises:
        ConfigurationError: one line for every problem, misspelt variables included.
    """
    given = {name: value for name, value in overrides.items() if value is not None}
    misspelt = [
        problem
        for variable in sorted(os.environ)
        if variable.startswith(PREFIX) and (problem := _name_problem(variable.removeprefix(PREFIX).lower()))
    ]
    problems = "\n".join(f"  - {problem}" for problem in misspelt)
    try:
        settings = Settings(**given)
    except ValidationError as error:
        rest = "\n".join(str(problem["msg"]) for problem in error.errors())
        problems = "\n".join(filter(None, (problems, rest)))
    if problems:
        raise ConfigurationError(f"these settings cannot work:\n{problems}")
    return settings


def _name_problem(name: str) -> str | None:
    if name in Settings.model_fields:
        return None
    close = difflib.get_close_matches(name, Settings.model_fields, n=1)
    hint = f"; did you mean {PREFIX}{close[0].upper()}?" if close else ""
    return f"there is no setting {PREFIX}{name.upper()}{hint}"


def namespace_problem(name: str) -> str | None:
    if not re.fullmatch(r"[A-Za-z0-9._/#:-]{1,255}", name, re.ASCII) or name.startswith((":", "AWS/")):
        return f"is {name!r:.80}; use 1 to 255 letters, digits and . - _ / # :, not AWS/ at the beginning"
    return None


def queue_problem(url: str) -> str | None:
    parts = urlsplit(url)
    example = "https://sqs.eu-central-1.amazonaws.com/123456789012/thunderagent"
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.count("/") != 2 or url.endswith("/"):
        return f"is not the URL of an SQS queue; write for example {example}"
    if url.endswith(".fifo"):
        return "is a FIFO queue, in which one ring would wait for another; use a standard queue"
    return None


def push_problem(endpoint: str) -> str | None:
    try:
        parts = urlsplit(endpoint)
        if parts.hostname and (parts.scheme == "https" or (parts.scheme == "http" and _is_here(parts.hostname))):
            return None
    except ValueError:
        pass
    return f"is {endpoint!r:.200}; use https://API.execute-api.REGION.amazonaws.com/STAGE (https, and not wss)"


def _is_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
