"""The canary as an AWS Lambda function, for a schedule of once a minute: it needs no agent to be alive.

Its environment, whose names an agent has too with `THUNDERAGENT_CANARY_…`:

* `CANARY_TARGETS`: JSON, the URLs of WebSocket APIs by region;
* `CANARY_OBSERVER`: the region that looks; without it the function's own;
* `CANARY_NAMESPACE`: of the metrics; without it none are sent;
* `CANARY_SECRET`: name or ARN of a secret with the token, or what a token is asked for with; or `CANARY_TOKEN_FROM`.

Each run tries every target once, within ten seconds, and sends what an agent sends: `CanaryHealthy` by `Target` and
`Observer`, and `CanaryLatency` by `Target` and `Step`.

A container that stays warm remembers what went before, so that a target that was down is shown as such until five
attempts in a row did. A new one knows nothing, and shows what it sees.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Mapping
from typing import Any

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from thunderagent.bus import EventBus
from thunderagent.canary.making import make_prober, observer_of
from thunderagent.canary.watch import probed
from thunderagent.cloudwatch import CloudWatch, data_of
from thunderagent.errors import ConfigurationError
from thunderagent.hysteresis import Hysteresis
from thunderagent.meter import Meter
from thunderagent.settings import Settings, load_settings


class Canary:
    """What a container keeps from one run to the next.

    Args:
        settings: targets, token, namespace.
        to: takes the data; None: sends none.

    Raises:
        ConfigurationError: there is no target.
    """

    def __init__(self, settings: Settings, to: CloudWatch | None) -> None:
        if not settings.canary_targets:
            raise ConfigurationError(
                "no target is set: CANARY_TARGETS is a JSON object, the URLs of WebSocket APIs by region"
            )
        self._targets = settings.canary_targets
        self._observer = observer_of(settings)
        self._prober = make_prober(settings, f"function {os.environ.get('AWS_LAMBDA_FUNCTION_NAME', '')}")
        self._to = to
        self._judged = dict.fromkeys(self._targets, Hysteresis())
        self._versions: dict[str, int] = {}

    def run(self) -> dict[str, Any]:
        """Try every target once, send what was found, and answer with it.

        Raises:
            StoreError: CloudWatch did not take the data, so that an alarm on missing data goes off.
        """
        bus = EventBus()
        meter = Meter(bus)
        results = asyncio.run(self._prober.probe_all(self._targets, self._versions))
        for result in results:
            self._judged[result.target] = self._judged[result.target].after(result.ok)
            self._versions[result.target] = result.version
            bus.emit(probed(result, self._observer, self._judged[result.target]))
        if self._to is not None:
            self._to.put([datum for _, datum in data_of(meter.read())])
        return {
            "observer": self._observer,
            "healthy": {name: judged.is_fine for name, judged in self._judged.items()},
            "probes": [result.told() for result in results],
        }


class FunctionSettings(BaseSettings):
    """The environment of the function."""

    model_config = SettingsConfigDict(env_prefix="CANARY_", extra="ignore", hide_input_in_errors=True)

    targets: dict[str, str] = Field(default_factory=dict)
    observer: str | None = None
    namespace: str | None = None
    secret: str | None = None
    token_from: str | None = None


def load() -> Settings:
    """The settings of an agent that the environment of the function means.

    Raises:
        ConfigurationError: they cannot work; all problems are listed.
    """
    try:
        given = FunctionSettings()
    except (ValidationError, SettingsError):
        raise ConfigurationError(
            'CANARY_TARGETS is no JSON object of URLs; write for example {"eu-central-1": "wss://ws.example.com/prod"}'
        ) from None
    return load_settings(
        canary_targets=given.targets or None,
        canary_token_from=f"secret:{given.secret}" if given.secret else given.token_from or None,
        cloudwatch_namespace=given.namespace or None,
        region=given.observer or None,
    )


_guard = threading.Lock()
_canary: Canary | None = None


def handler(event: Mapping[str, Any], context: object) -> dict[str, Any]:
    """What AWS Lambda calls, with whatever a schedule sends.

    Raises:
        ConfigurationError: the settings cannot work; all problems are listed.
        StoreError: CloudWatch did not take the data.
    """
    global _canary
    with _guard:
        if _canary is None:
            settings = load()
            namespace = settings.cloudwatch_namespace
            _canary = Canary(settings, CloudWatch(namespace, now=time.time) if namespace is not None else None)
        return _canary.run()
