"""The canary as an AWS Lambda function, for a schedule of once a minute: it needs no living agent.

Its environment has the settings of agents: `THUNDERAGENT_CANARY_TARGETS`, `THUNDERAGENT_CANARY_TOKEN_FROM` (mostly
`secret:ARN`), `THUNDERAGENT_CLOUDWATCH_NAMESPACE`, without which it sends nothing, and `THUNDERAGENT_REGION`, which is
the function's own by default.

Each run tries every target once, within ten seconds, and sends the metrics of an agent: `CanaryHealthy` by `Target` and
`Observer`, and `CanaryLatency` by `Target` and `Step`.

A warm container remembers: a target that was down stays down until five attempts in a row succeed. A new container
shows what it sees.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from thunderagent.model.bus import EventBus
from thunderagent.model.errors import ConfigurationError
from thunderagent.settings import Settings, load_settings
from thunderagent.telemetry.cloudwatch import CloudWatch, data_of
from thunderagent.telemetry.logs import Telemetry, configure_logging
from thunderagent.telemetry.meter import Meter
from thunderagent.websocket_api.canary.making import make_prober, observer_of
from thunderagent.websocket_api.canary.watch import Judge


class Canary:
    """What a container keeps between runs.

    Args:
        settings: targets, token, namespace.
        to: gets the metrics; None: they are not sent.

    Raises:
        ConfigurationError: there is no target.
    """

    def __init__(self, settings: Settings, to: CloudWatch | None) -> None:
        if not settings.canary_targets:
            raise ConfigurationError(
                "there is no target: set THUNDERAGENT_CANARY_TARGETS, a JSON object with the URLs of APIs by region"
            )
        self._targets = settings.canary_targets
        self._observer = observer_of(settings)
        self._prober = make_prober(settings, f"function {os.environ.get('AWS_LAMBDA_FUNCTION_NAME', '')}")
        self._to = to
        self._judge = Judge(self._targets, self._observer)

    def run(self) -> dict[str, Any]:
        """Try every target once, send the results, and return them.

        Raises:
            StoreError: CloudWatch did not take the metrics, so the alarm on missing data goes off.
        """
        bus = EventBus()
        Telemetry(bus)
        meter = Meter(bus)
        results = asyncio.run(self._prober.probe_all(self._targets, self._judge.versions))
        for result in results:
            self._judge.take(result, bus)
        if self._to is not None:
            self._to.put([datum for _, datum in data_of(meter.read())])
        return {
            "observer": self._observer,
            "healthy": {name: self._judge.is_fine(name) for name in self._targets},
            "probes": [result.as_data() for result in results],
        }


_guard = threading.Lock()
_canary: Canary | None = None


def handler(event: Mapping[str, Any], context: object) -> dict[str, Any]:
    """The Lambda function, for any event of a schedule.

    Raises:
        ConfigurationError: the settings cannot work; lists all problems.
        StoreError: CloudWatch did not take the metrics.
    """
    global _canary
    with _guard:
        if _canary is None:
            settings = load_settings()
            configure_logging(
                settings.log_level, as_json=settings.log_json, redact=settings.log_redact, stream=sys.stderr
            )
            namespace = settings.cloudwatch_namespace
            _canary = Canary(settings, CloudWatch(namespace, now=time.time) if namespace is not None else None)
        return _canary.run()
