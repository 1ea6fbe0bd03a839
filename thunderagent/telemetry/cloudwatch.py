"""Sends the metrics of an agent to Amazon CloudWatch in as few PutMetricData requests as its limits allow.

Everything is sent once a minute, the open connections in between as well. What could not be sent is in the next
minute's data, as counts only grow. A lost reply may count a minute twice; none is left out.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from thunderagent.model import fleet_events
from thunderagent.model.bus import EventBus
from thunderagent.model.errors import ThunderAgentError
from thunderagent.stores.aws import LOCAL_REGION, build, is_loopback, new_session, translate
from thunderagent.stores.dynamo.batches import chunks
from thunderagent.telemetry import metrics
from thunderagent.telemetry.meter import Distribution, Meter, Reader, Reading, Series
from thunderagent.telemetry.metrics import OTHER, Metric

MOST_DATA: Final = 1000
"""Most data of one request."""
MOST_BYTES: Final = 900_000
"""Most bytes of one request by our estimate, which is too high; CloudWatch allows a megabyte."""
MOST_VALUES: Final = 150
"""Most different values of one datum."""

LONGEST_LABEL: Final = 255

Datum = dict[str, Any]


def data_of(reading: Reading) -> Iterator[tuple[Series, Datum]]:
    """The data of a reading; a distribution of many values is several data."""
    for series, value in (*reading.counters.items(), *reading.gauges.items()):
        yield series, {**_head(*series), "Value": value}
    for series, distribution in reading.distributions.items():
        for values, counts in _arrays(distribution):
            yield series, {**_head(*series), "Values": values, "Counts": counts}


def portions_of(data: Iterable[tuple[Series, Datum]]) -> Iterator[list[tuple[Series, Datum]]]:
    """The data in portions for one request each."""
    portion: list[tuple[Series, Datum]] = []
    size = 0
    for series, datum in data:
        more = _size(datum)
        if portion and (len(portion) >= MOST_DATA or size + more > MOST_BYTES):
            yield portion
            portion, size = [], 0
        portion.append((series, datum))
        size += more
    if portion:
        yield portion


class CloudWatch:
    """Puts data into one namespace. Safe in threads and after a fork; the client is made on first use.

    Args:
        namespace: of the metrics.
        region: AWS region; None: the one of the environment.
        endpoint: of a local engine; None: AWS.
        now: epoch seconds, the moment that data are sent with.
    """

    def __init__(
        self, namespace: str, *, region: str | None = None, endpoint: str | None = None, now: Callable[[], float]
    ) -> None:
        self.namespace = namespace
        self.region = region
        self.endpoint = endpoint
        self._now = now
        self._clients: dict[tuple[int, bool], Any] = {}

    def put(self, data: Iterable[Datum], *, hurry: bool = False) -> None:
        """Send the data of one portion. In a hurry there is one short attempt.

        Raises:
            AccessDenied: `cloudwatch:PutMetricData` is not allowed.
            ConfigurationError: no region is known.
            CredentialsMissing: there are no credentials.
            CredentialsExpired: they are over.
            StoreError: CloudWatch did not answer, or did not take the data.
        """
        moment = datetime.fromtimestamp(self._now(), UTC)
        dated = [{**datum, "Timestamp": moment} for datum in data]
        try:
            self._client(hurry).put_metric_data(Namespace=self.namespace, MetricData=dated)
        except (ClientError, BotoCoreError) as error:
            place = f"CloudWatch in region {self.region or '(of the environment)'}, namespace {self.namespace!r}"
            raise translate(error, "PutMetricData", place, permission="cloudwatch:PutMetricData") from error

    def close(self) -> None:
        for (pid, _), client in self._clients.items():
            if pid == os.getpid():
                client.close()
        self._clients = {}

    def _client(self, hurry: bool) -> Any:
        key = os.getpid(), hurry
        if key not in self._clients:
            self._clients[key] = build(lambda: self._make(hurry))
        return self._clients[key]

    def _make(self, hurry: bool) -> Any:
        local = is_loopback(self.endpoint)
        session = new_session(local=local)
        return session.client(
            "cloudwatch",
            region_name=self.region or session.region_name or (LOCAL_REGION if local else None),
            endpoint_url=self.endpoint,
            config=Config(
                connect_timeout=1,
                read_timeout=1 if hurry else 3,
                retries={"mode": "standard", "total_max_attempts": 1 if hurry else 2},
            ),
        )


def _head(metric: Metric, label: str) -> Datum:
    head: Datum = {"MetricName": metric.cloudwatch, "Unit": str(metric.unit)}
    if metric.dimensions:
        named = zip(metric.dimensions, metric.values(label), strict=True)
        head["Dimensions"] = [{"Name": str(name), "Value": _plain(value)} for name, value in named]
    return head


def _plain(value: str) -> str:
    """A value that CloudWatch allows; any other has the whole request refused."""
    return value.encode("ascii", "replace").decode()[:LONGEST_LABEL] or OTHER


def _arrays(distribution: Distribution) -> Iterator[tuple[list[float], list[float]]]:
    for some in chunks(sorted(distribution.counts.items()), MOST_VALUES):
        yield [value for value, _ in some], [float(number) for _, number in some]


def _size(datum: Mapping[str, Any]) -> int:
    """Bytes of a datum in the longest format of the service."""
    return 600 + 100 * len(datum.get("Values", ())) + sum(3 * len(one["Value"]) for one in datum.get("Dimensions", ()))


HALF_MINUTE_S: Final = 30.0
FLUSH_S: Final = 2.0
"""Longest wait for the last data at the end of an agent."""


class Export:
    """The work of the thread `cloudwatch` each half minute; `last` at the end, in any thread."""

    def __init__(self, meter: Meter, to: CloudWatch, bus: EventBus) -> None:
        self._meter = meter
        self._to = to
        self._bus = bus
        self._reader = Reader(meter.read)
        self._sending = threading.Lock()
        self._turns = 0
        self._problem: str | None = None

    def turn(self) -> None:
        """Send what is due: nothing at first, the connections at each half minute, everything at each whole."""
        turn, self._turns = self._turns, self._turns + 1
        if turn == 0:
            return
        if turn % 2 == 0:
            self._send()
        elif (metrics.STREAMS_HELD, "") in (now := self._meter.read()).gauges:  # else it is 0 in every minute
            series = (metrics.ACTIVE_CONNECTIONS, "")
            only = Reading({}, {series: now.gauges[series]}, {}, now.set_at, now.at)
            self._attempt(lambda: self._to.put([datum for _, datum in data_of(only)]))

    def last(self) -> None:
        """Send everything once more, within `FLUSH_S` even if the name of the service does not resolve."""
        thread = threading.Thread(target=lambda: self._send(hurry=True), name="metrics-flush", daemon=True)
        thread.start()
        thread.join(FLUSH_S)

    def _send(self, *, hurry: bool = False) -> None:
        if not self._sending.acquire(timeout=FLUSH_S):
            return  # the minute's data are on their way
        try:
            self._attempt(lambda: self._put_all(hurry))
        finally:
            self._sending.release()

    def _put_all(self, hurry: bool) -> None:
        for portion in portions_of(data_of(self._reader.take())):
            self._to.put([datum for _, datum in portion], hurry=hurry)
            self._reader.kept({series for series, _ in portion})

    def _attempt(self, send: Callable[[], None]) -> None:
        """Send; a failure is an event if it is another than the last one."""
        try:
            send()
        except ThunderAgentError as error:
            kind = type(error).__name__
            if kind != self._problem:
                self._problem = kind
                self._bus.emit(fleet_events.ExportFailed(to="CloudWatch", error=str(error)))
        else:
            self._problem = None


def cloudwatch_place(store: str) -> dict[str, str | None]:
    """Region and endpoint of CloudWatch: those of the table; an endpoint only of a local engine."""
    query = dict(parse_qsl(urlsplit(store).query)) if store.startswith("dynamodb://") else {}
    endpoint = query.get("endpoint")
    return {"region": query.get("region"), "endpoint": endpoint if is_loopback(endpoint) else None}
