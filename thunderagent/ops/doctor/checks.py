"""The examination of an installation: its checks in their order, each bounded in time.

A check that needs something that is wrong is skipped. Nothing ends the examination early.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from thunderagent.agent.queues import check_leases
from thunderagent.jobs.job import Job
from thunderagent.jobs.registry import Registry
from thunderagent.model.clock import DateClock
from thunderagent.model.conditions import Present, Write
from thunderagent.model.errors import ConfigurationError, StoreError, StoreUnavailable, ThunderAgentError
from thunderagent.model.task import Row
from thunderagent.model.version import __version__
from thunderagent.ops.doctor.findings import Check, Finding, State
from thunderagent.ops.doctor.regions import look_at_region
from thunderagent.ops.doctor.supervision import find_conf, find_others, look_at_agent_units, look_at_supervisor
from thunderagent.queue.stats import overdue_text, queue_stats
from thunderagent.settings import PREFIX, Settings, load_settings
from thunderagent.stores import open_engine
from thunderagent.stores.engine import Applied, Engine
from thunderagent.stores.tasks import TaskStore

EXAMINED_S: Final = 15.0
"""Longest time of one check; then it is reported and left behind."""
SLOW_S: Final = 0.1
"""Median that is worth a warning: DynamoDB in the same region takes 5 to 10 ms, a local disk 1 to 20."""

NAMED: Final = 10
"""Most queues that a sentence names."""

SKEW_S: Final = 2.0
WRONG_SKEW_S: Final = 240.0
"""AWS refuses requests that are signed five minutes early or late."""

LAPS: Final = 5
"""Number of timed reads, and of timed writes."""

PROBE_LIVES_S: Final = 3600
"""Life of a row that could not be deleted."""

_OF_STORE: Final = ("store", "file", "table", "permissions", "latency", "queues")


@dataclass(slots=True)
class Doctor:
    """Examines what an agent with these settings would find here.

    Args:
        store: URL instead of the setting.
        jobs: package of the jobs; None: they are not checked.
        supervisor_conf: the configuration to read; None: the one that runs here, or is installed.
        environ: the environment.
        opening: makes the engine of a URL.
        clients: makes clients of AWS services, as `services.clients_at` does.
        limit_s: longest time of one check.
    """

    store: str | None = None
    jobs: str | None = None
    supervisor_conf: Path | None = None
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    opening: Callable[[str], Engine] = lambda url: open_engine(url, hasty=True)
    clients: Callable[..., Callable[[str], Any]] | None = None
    limit_s: float = EXAMINED_S
    url: str = ""
    """The store that is examined, once it is known."""
    is_reachable: bool = True
    """False once the store did not answer: further requests to it are skipped."""
    is_usable: bool = True
    """False once the table was wrong: checks that need it are skipped."""
    _settings: Settings = field(default_factory=Settings.model_construct)
    _engine: Engine | None = None
    _registry: Registry | None = None

    def checks(self) -> tuple[Check, ...]:
        always = (
            Check("python", self._python),
            Check("settings", self._of_settings),
            Check("jobs", self._of_jobs),
            Check("supervisor", self._supervisor),
        )
        of_store = (
            Check("store", self._open),
            Check("file", self._file),
            Check("credentials", self._credentials),
            Check("table", self._table),
            Check("permissions", self._permissions),
            Check("latency", self._latency),
            Check("clock", self._clock),
        )
        around = (
            Check("wake queue", self._wake_queue),
            Check("bucket", self._bucket),
            Check("metrics", self._metrics),
            Check("region", lambda: look_at_region(self._settings, self.opening)),
            Check("queues", self._queues),
        )
        return (*always, *of_store, *around)

    def examine(self, progress: Callable[[str], None] = lambda check: None) -> Iterator[Finding]:
        """Do the checks in their order; `progress` is called with the name of each before it begins."""
        for check in self.checks():
            progress(check.name)
            yield from self._bounded(check)
        if self._engine is not None:
            self._engine.close()

    def _bounded(self, check: Check) -> list[Finding]:
        """The findings of a check within `limit_s`, in a thread that is left behind if it hangs."""
        found: list[Finding] = []

        def work() -> None:
            try:
                found.extend(check.work())
            except StoreUnavailable as error:
                self.is_reachable = False
                found.append(Finding(check.name, State.WRONG, str(error), _reach(self.url)))
            except ThunderAgentError as error:
                found.append(Finding(check.name, State.WRONG, str(error), _see(error)))
            except Exception as error:
                what = f"the check itself failed: {type(error).__name__}: {error}"
                found.append(Finding(check.name, State.WRONG, what, "please report this"))

        thread = threading.Thread(target=work, name=f"doctor {check.name}", daemon=True)
        thread.start()
        thread.join(self.limit_s)
        findings = list(found)
        if any(one.state is State.WRONG and _is_basis(check.name, one.check) for one in findings):
            self.is_usable = False
        if thread.is_alive():
            self.is_reachable = self.is_reachable and check.name not in _OF_STORE
            what = f"it has not ended within {self.limit_s:g} s"
            findings.append(Finding(check.name, State.WRONG, what, "check name resolution and routes of this host"))
        return findings

    # The installation

    def _python(self) -> Iterator[Finding]:
        parts = [f"ThunderAgent {__version__}", f"Python {sys.version.split()[0]}", f"SQLite {sqlite3.sqlite_version}"]
        parts += [f"{name} {_version_of(name)}" for name in ("boto3", "pydantic", "websockets")]
        old = [
            what
            for what, have, need in (
                ("Python", sys.version_info[:2], (3, 11)),
                ("SQLite", sqlite3.sqlite_version_info[:2], (3, 35)),
            )
            if have < need
        ]
        if old:
            remedy = "ThunderAgent needs Python 3.11 with SQLite 3.35 or newer: make a new virtual environment"
            yield Finding("python", State.WRONG, f"{', '.join(parts)}: {' and '.join(old)} too old", remedy)
        else:
            yield Finding("python", State.OK, ", ".join(parts))

    def _of_settings(self) -> Iterator[Finding]:
        try:
            self._settings = load_settings(store=self.store)
        except ConfigurationError as error:
            for problem in str(error).splitlines()[1:]:
                remedy = "mend it in the environment, on EC2 in /etc/thunderagent/environment; agents refuse to start"
                yield Finding("settings", State.WRONG, problem.strip().removeprefix("- "), remedy)
            url = self.store or self.environ.get(f"{PREFIX}STORE")
            self._settings = Settings.model_construct(store=url) if url else Settings.model_construct()
        else:
            given = sorted(name for name in self.environ if name.startswith(PREFIX))
            what = f"{', '.join(given)} set, the rest by default" if given else "all by default"
            yield Finding("settings", State.OK, what)
            yield from doubts_about_settings(self._settings)
        self.url = self._settings.store

    def _of_jobs(self) -> Iterator[Finding]:
        if self.jobs is None:
            yield Finding(
                "jobs", State.SKIPPED, "no package was named", "thunderagent doctor PACKAGE looks at its jobs"
            )
            return
        self._registry = Registry.from_package(self.jobs)
        try:
            check_leases(self._registry, self._settings)
        except ConfigurationError as error:
            for problem in str(error).splitlines()[1:]:
                remedy = f"mend the options of the job in {self.jobs}, or the settings"
                yield Finding("jobs", State.WRONG, problem.strip().removeprefix("- "), remedy)
            return
        doubts = list(doubts_about_jobs(self._registry, self._settings))
        yield from doubts
        if not doubts:
            queues = ", ".join(sorted(self._registry.queues))
            number = "1 job" if len(self._registry) == 1 else f"{len(self._registry)} jobs"
            yield Finding("jobs", State.OK, f"{number} in {self.jobs}, for {queues}")

    def _supervisor(self) -> Iterator[Finding]:
        conf = self.supervisor_conf or find_conf(self.environ)
        of_units = list(look_at_agent_units(self._settings))
        if conf is not None:
            yield from look_at_supervisor(self._settings, conf, self.environ)
        elif others := find_others(self.environ):
            what = f"a supervisord runs here with {others[0]}, which does not run these agents"
            yield Finding("supervisor", State.SKIPPED, what, "--supervisor-conf PATH checks it")
        elif not of_units:
            remedy = "whatever stops the agents must wait longer than drain_s; or name one: --supervisor-conf PATH"
            yield Finding("supervisor", State.SKIPPED, "no supervisord.conf runs or is installed here", remedy)
        yield from of_units

    # The store

    def _open(self) -> Iterator[Finding]:
        engine = self.opening(self._settings.store)
        self._engine, self.url = engine, engine.url
        yield Finding("store", State.OK, engine.url)

    def _file(self) -> Iterator[Finding]:
        path = getattr(self._engine, "path", None)
        if path is not None:
            from thunderagent.ops.doctor.sqlite import look_at_file

            yield from look_at_file(path)

    def _credentials(self) -> Iterator[Finding]:
        if (engine := self._dynamo()) is not None:
            from thunderagent.ops.doctor.services import identify

            yield from identify(engine.connection.place, self._clients(engine.connection.place))

    def _table(self) -> Iterator[Finding]:
        if (engine := self._dynamo()) is not None:
            from thunderagent.ops.doctor.dynamo import look_at_table

            yield from look_at_table(engine)

    def _permissions(self) -> Iterator[Finding]:
        if (engine := self._dynamo()) is None:
            return
        if not self.is_reachable:
            yield self._skipped("permissions")
            return
        from thunderagent.ops.doctor.dynamo import try_actions

        yield from try_actions(engine, probe_row(engine.clock.now()))

    def _latency(self) -> Iterator[Finding]:
        engine = self._engine
        if engine is None or not self._can_be_used(engine):
            yield self._skipped("latency")
            return
        if getattr(engine, "is_older", False):
            what = "a write would bring the file to the schema of this release"
            yield Finding("latency", State.SKIPPED, what, "run doctor again when agents of this release have the file")
            return
        reads, writes = run_laps(engine)
        read_s, write_s = statistics.median(reads), statistics.median(writes)
        found = f"median of {LAPS}: read {_ms(read_s)}, write {_ms(write_s)}"
        if max(read_s, write_s) > SLOW_S:
            near = (
                "run agents in the region of the table"
                if self._dynamo()
                else "look at the load of the disk: iostat -x 1"
            )
            yield Finding("latency", State.WARNING, f"{found}: that is slow", near)
        else:
            yield Finding("latency", State.OK, found)

    def _clock(self) -> Iterator[Finding]:
        clock = self._engine.clock if self._engine is not None else None
        if isinstance(clock, DateClock):
            yield judge_clock(clock)

    # What is around it

    def _wake_queue(self) -> Iterator[Finding]:
        url, engine = self._settings.wake_queue_url, self._dynamo()
        if engine is None:
            return
        if not url:
            remedy = f"agents poll; with an SQS queue in {PREFIX}WAKE_QUEUE_URL they start tasks at once"
            yield Finding("wake queue", State.SKIPPED, "none is set", remedy)
            return
        from thunderagent.ops.doctor.services import look_at_queue

        parts = urlsplit(url)
        yield from look_at_queue(url, self._clients(engine.connection.place, f"{parts.scheme}://{parts.netloc}"))

    def _bucket(self) -> Iterator[Finding]:
        if self._settings.blob_bucket and (engine := self._dynamo()) is not None:
            from thunderagent.ops.doctor.services import look_at_bucket
            from thunderagent.stores.s3 import PREFIX as OBJECTS

            yield from look_at_bucket(self._settings.blob_bucket, self._clients(engine.connection.place), OBJECTS)

    def _metrics(self) -> Iterator[Finding]:
        if namespace := self._settings.cloudwatch_namespace:
            from thunderagent.ops.doctor.services import look_at_metrics
            from thunderagent.stores.aws import is_loopback
            from thunderagent.stores.dynamo.errors import Place

            engine = self._dynamo()
            place = engine.connection.place if engine is not None else Place("")
            local = place.endpoint if is_loopback(place.endpoint) else None
            yield from look_at_metrics(namespace, self._clients(place, local))

    def _queues(self) -> Iterator[Finding]:
        engine = self._engine
        if engine is None or not self._can_be_used(engine):
            yield self._skipped("queues")
            return
        store = TaskStore(engine)
        if overdue := overdue_text(store):
            remedy = "agents delete them, a thousand a second each: see that one runs on this store, and its log"
            yield Finding("expiry", State.WARNING, overdue, remedy)
        found = queue_stats(store)
        lonely = [one for one in found if one.ready and (not one.agents or one.unknown_jobs)]
        for one in lonely:
            if one.agents:
                what = f"queue {one.queue}: no live agent has the jobs {', '.join(one.unknown_jobs)}"
                remedy = "deploy the code that has them, or: thunderagent list --queue " + one.queue
            else:
                tasks = "1 task is" if one.ready == 1 else f"{one.ready} tasks are"
                what = f"queue {one.queue}: {tasks} ready and no live agent serves it"
                remedy = f"thunderagent run JOBS --queue {one.queue}"
            yield Finding("queues", State.WARNING, what, remedy)
        if not lonely:
            named = ", ".join(one.queue for one in found[:NAMED]) + (" and more" if len(found) > NAMED else "")
            yield Finding("queues", State.OK, f"no ready task lacks an agent: {named or 'there is no queue yet'}")

    def _clients(self, *where: Any, **options: Any) -> Callable[[str], Any]:
        if self.clients is not None:
            return self.clients(*where, **options)
        from thunderagent.ops.doctor.services import clients_at

        return clients_at(*where, **options)

    def _can_be_used(self, engine: Engine) -> bool:
        return self.is_reachable and self.is_usable and _is_there(engine)

    def _skipped(self, check: str) -> Finding:
        if not self.is_reachable:
            return Finding(check, State.SKIPPED, "the store does not answer")
        return Finding(check, State.SKIPPED, "see above" if not self.is_usable else "the file is not there yet")

    def _dynamo(self) -> Any:
        """The engine if it is on DynamoDB."""
        return self._engine if hasattr(self._engine, "connection") else None


def doubts_about_settings(settings: Settings) -> Iterator[Finding]:
    """Settings that work, but probably not as intended."""
    if settings.traces and find_spec("opentelemetry") is None:
        remedy = "pip install 'thunderagent[traces]'"
        yield Finding("settings", State.WRONG, f"{PREFIX}TRACES is on and OpenTelemetry is not installed", remedy)
    if settings.http_port and settings.http_host not in ("127.0.0.1", "localhost", "::1"):
        what = f"{PREFIX}HTTP_HOST is {settings.http_host}: every host that reaches it may read the metrics"
        yield Finding("settings", State.WARNING, what, "let a security group allow only the hosts that scrape them")
    folder = settings.health_folder
    if folder and not (Path(folder).is_dir() and os.access(folder, os.W_OK)):
        what = f"{PREFIX}HEALTH_FOLDER {folder} is no folder that this user can write to"
        yield Finding("settings", State.WARNING, what, f"mkdir -p {folder}, and chown it to the user of the agents")
    if settings.wake_queue_url and settings.store.startswith("sqlite"):
        what = f"{PREFIX}WAKE_QUEUE_URL is set, and an embedded store does not use it"
        yield Finding("settings", State.WARNING, what, "take it away, or name a dynamodb:// store")


def doubts_about_jobs(jobs: Registry, settings: Settings) -> Iterator[Finding]:
    """Jobs and settings that do not fit each other."""
    for queue in sorted(set(settings.queues) - set(jobs.queues)):
        what = f"{PREFIX}QUEUES serves the queue {queue}, to which none of these jobs goes"
        yield Finding("jobs", State.WARNING, what, "only tasks put there by name run in its slots: is it misspelt?")
    for queue in sorted(set(jobs.queues) - set(settings.queues)) if settings.queues else ():
        named = ", ".join(sorted(one.name for one in jobs.values() if one.queue == queue))
        what = f"the jobs {named} go to the queue {queue}, which {PREFIX}QUEUES does not serve"
        yield Finding("jobs", State.WARNING, what, f"add it to {PREFIX}QUEUES, or let other agents serve it")
    streams: list[Job[Any]] = [one for one in jobs.values() if one.is_stream]
    if streams and not settings.max_streams:
        what = f"{PREFIX}MAX_STREAMS is 0 and {', '.join(sorted(one.name for one in streams))} are streams"
        yield Finding("jobs", State.WARNING, what, "let other agents hold them, or raise it")


def probe_row(now: float) -> Row:
    """A row that is no task, is in no index, and expires."""
    return {"taskId": f"control:doctor:{secrets.token_hex(8)}", "fence": 0, "expireAt": int(now + PROBE_LIVES_S)}


def run_laps(engine: Engine) -> tuple[list[float], list[float]]:
    """Seconds of `LAPS` reads and of `LAPS` writes, of a row that is deleted afterwards."""
    row = probe_row(engine.clock.now())
    name = row["taskId"]
    touch = Write(verb="probe", task_id=name, increase={"fence": 1}, require=[Present("taskId")])
    forget = Write(verb="forget probe", task_id=name, delete=True, require=[Present("taskId")])
    try:
        _answered(engine.put([row]))
        reads = [_timed(lambda: engine.get([name])) for _ in range(LAPS)]
        writes = [_timed(lambda: _answered(engine.apply([touch]))) for _ in range(LAPS)]
    finally:
        with suppress(StoreError):
            engine.apply([forget])
    return reads, writes


def _answered(answers: Iterable[Applied]) -> None:
    for answer in answers:
        if answer.error:
            raise answer.error


def _timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def judge_clock(clock: DateClock) -> Finding:
    """The difference between the clock of this host and that of AWS's replies."""
    if not clock.is_usable:
        return Finding("clock", State.SKIPPED, "no reply of the store had the time")
    skew, rough = clock.skew, (clock.latest() - clock.earliest()) / 2
    off = f"{abs(skew):.1f} s {'ahead' if skew > 0 else 'behind'}"
    found = f"this host is {off} of the store's clock, give or take {rough:.1f} s"
    remedy = "let it be kept: timedatectl set-ntp true, or install chrony"
    if abs(skew) - rough > WRONG_SKEW_S:
        what = f"{found}: AWS refuses requests that are five minutes off"
        return Finding("clock", State.WRONG, what, remedy)
    if abs(skew) - rough > SKEW_S:
        what = f"{found}; leases do not depend on it, the times of log lines do"
        return Finding("clock", State.WARNING, what, remedy)
    return Finding("clock", State.OK, found)


def _is_basis(check: str, found: str) -> bool:
    """Whether a wrong finding of this check makes the store useless."""
    return check in ("store", "table") or (check == "file" and found in ("file", "database"))


def _is_there(engine: Engine) -> bool:
    """False for a missing file: the examination must not make it."""
    path = getattr(engine, "path", None)
    return path is None or path == ":memory:" or Path(path).exists()


def _reach(url: str) -> str:
    if url.startswith("sqlite"):
        return "see which process holds the file: fuser -v FILE; and whether the disk is full: df -h"
    return "check the region and the endpoint in THUNDERAGENT_STORE, credentials, route and security group of this host"


def _see(error: ThunderAgentError) -> str:
    return "thunderagent table create" if isinstance(error, StoreError) and "create it with" in str(error) else ""


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"
