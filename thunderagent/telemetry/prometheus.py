"""The metrics of an agent in the text format of Prometheus, by the library `prometheus_client`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from thunderagent.model.version import __version__
from thunderagent.telemetry.meter import Distribution, Meter, Reading
from thunderagent.telemetry.metrics import METRICS, Kind, Metric

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0)
"""Upper ends of the buckets of every distribution, in seconds."""
FRESH_S: Final = 150.0
"""How long a gauge of the fleet is shown after it was set: another agent may set it now."""


def is_installed() -> bool:
    """Whether the library is installed; without it `/metrics` names what to install."""
    return find_spec("prometheus_client") is not None


def prometheus_text(meter: Meter) -> bytes:
    from prometheus_client.exposition import generate_latest  # a quarter of a second, and few need it

    text: bytes = generate_latest(_Collector(meter.read))
    return text


class _Collector:
    def __init__(self, read: Callable[[], Reading]) -> None:
        self._read = read

    def collect(self) -> Iterator[Family]:
        """A family for each metric, also without a value."""
        from prometheus_client.core import GaugeMetricFamily

        reading = self._read()
        for metric in METRICS:
            yield _family(metric, reading)
        info = GaugeMetricFamily("thunderagent_info", "The version of the agent.", labels=["version"])
        info.add_metric([__version__], 1.0)
        yield info


def _family(metric: Metric, reading: Reading) -> Family:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    labels = [dimension.lower() for dimension in metric.dimensions]
    family: Any
    if metric.kind is Kind.DISTRIBUTION:
        family = HistogramMetricFamily(metric.prometheus, metric.help, labels=labels)
        for (_, label), distribution in _of(metric, reading.distributions):
            family.add_metric(metric.values(label), _buckets(distribution), distribution.total)
        return family  # type: ignore[no-any-return]
    is_counter = metric.kind is Kind.COUNTER
    family = (CounterMetricFamily if is_counter else GaugeMetricFamily)(metric.prometheus, metric.help, labels=labels)
    for (_, label), value in _of(metric, reading.counters if is_counter else reading.gauges):
        if not metric.must_be_fresh or reading.at - reading.set_at[metric, label] <= FRESH_S:
            family.add_metric(metric.values(label), value)
    if is_counter and not labels and (metric, "") not in reading.counters:
        family.add_metric([], 0.0)  # from the start, or `rate` misses the first one
    return family  # type: ignore[no-any-return]


def _of(metric: Metric, values: Any) -> Iterator[tuple[tuple[Metric, str], Any]]:
    return ((series, value) for series, value in values.items() if series[0] is metric)


def _buckets(distribution: Distribution) -> list[tuple[str, int]]:
    """How many values are at most each upper end."""
    found = [
        (str(end), sum(number for value, number in distribution.counts.items() if value <= end)) for end in BUCKETS
    ]
    return [*found, ("+Inf", distribution.number)]
