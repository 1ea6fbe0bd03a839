"""Where stacks are deployed: an account and a region of AWS, or a local engine; and the clients for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from botocore.config import Config

from deployment.errors import WrongOption, told
from thunderagent.stores.aws import LOCAL_REGION, build, new_session

_CONFIG: Final = Config(
    connect_timeout=5, read_timeout=60, retries={"mode": "standard", "total_max_attempts": 5}, tcp_keepalive=True
)


@dataclass(slots=False, kw_only=True)
class Cloud:
    """An account and a region, or a local engine at `endpoint`. For one thread."""

    region: str
    endpoint: str | None = None
    sleep: Callable[[float], None] = time.sleep
    monotonic: Callable[[], float] = time.monotonic
    _clients: dict[str, Any] = field(default_factory=dict)

    def client(self, service: str) -> Any:
        """A client of a service, made once."""
        if service not in self._clients:
            with told(f"opening {service}"):
                self._clients[service] = build(
                    lambda: new_session(local=self.endpoint is not None).client(
                        service, region_name=self.region, endpoint_url=self.endpoint, config=_CONFIG
                    )
                )
        return self._clients[service]

    @cached_property
    def account(self) -> str:
        """The number of the account; the first thing that is asked, so that missing credentials are told at once.

        Raises:
            DeploymentError: there are no usable credentials.
        """
        with told("asking who we are"):
            return str(self.client("sts").get_caller_identity()["Account"])

    @property
    def place(self) -> str:
        """Where it is, for people."""
        where = f"the local engine at {self.endpoint}" if self.endpoint else f"account {self.account}"
        return f"{where}, region {self.region}"

    def close(self) -> None:
        """Close the sockets."""
        for client in self._clients.values():
            client.close()
        self._clients.clear()


def open_cloud(region: str | None, endpoint: str | None = None) -> Cloud:
    """The place that is meant.

    Args:
        region: None: that of the environment.
        endpoint: of a local engine; None: AWS.

    Raises:
        WrongOption: nobody says which region.
    """
    if endpoint is not None:
        return Cloud(region=region or LOCAL_REGION, endpoint=endpoint)
    with told("reading the configuration of AWS"):
        found = region or new_session(local=False).region_name
    if not found:
        raise WrongOption("no AWS region: give --region, for example --region eu-central-1")
    return Cloud(region=found)
