"""The account that `thunderagent doctor --aws` examines: its deployed stacks, and requests that only read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

from thunderagent.model.clock import DateClock
from thunderagent.model.errors import ConfigurationError
from thunderagent.ops.doctor.checks import Doctor
from thunderagent.ops.doctor.findings import Check, Finding
from thunderagent.ops.doctor.services import Unanswered, ask
from thunderagent.settings import Settings, load_settings
from thunderagent.stores.aws import LOCAL_REGION, build, is_loopback, new_session
from thunderagent.stores.dynamo.errors import Place

GROUP: Final = "AWS::AutoScaling::AutoScalingGroup"
FUNCTION: Final = "AWS::Lambda::Function"
SERVICE: Final = "AWS::ECS::Service"
ATTEMPTS: Final = 3
"""Attempts of each request: AWS throttles requests that list and describe."""


@dataclass(frozen=True, slots=True)
class Stack:
    """A deployed stack and its resources."""

    name: str
    status: str
    parameters: Mapping[str, str]
    outputs: Mapping[str, str]
    resources: tuple[Mapping[str, Any], ...]

    @classmethod
    def of(cls, reply: Mapping[str, Any], resources: Iterator[Mapping[str, Any]]) -> Stack:
        """The stack of a reply of CloudFormation."""
        return cls(
            reply["StackName"],
            f"{reply['StackStatus']} {reply.get('StackStatusReason', '')}".strip(),
            {one["ParameterKey"]: one.get("ParameterValue", "") for one in reply.get("Parameters", ())},
            {one["OutputKey"]: one["OutputValue"] for one in reply.get("Outputs", ())},
            tuple(one for one in resources if one.get("PhysicalResourceId")),
        )


@dataclass(slots=True)
class Account(Doctor):
    """Examines the stacks of a prefix in one region, and the table of the settings.

    Args:
        prefix: begins the names of the stacks, as for `scripts/deploy`.
        region: None: that of the store's URL, else that of the environment.
        looks: the checks by their names.

    Raises:
        ConfigurationError: no region is known, or the settings are wrong.
    """

    prefix: str = "thunderagent"
    region: str | None = None
    looks: Mapping[str, Callable[[Account], Iterator[Finding]]] = field(default_factory=dict)
    stacks: list[Stack] = field(default_factory=list)
    who: str = ""
    """ARN of the credentials."""
    clock: DateClock = field(default_factory=DateClock)
    place: Place = field(default_factory=lambda: Place(""))
    """The table of the settings; its name is empty if they name none."""
    _made: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._settings = load_settings(store=self.store)
        parts = urlsplit(self._settings.store)
        query = dict(parse_qsl(parts.query)) if parts.scheme == "dynamodb" else {}
        endpoint = query.get("endpoint")
        region = self.region or query.get("region")
        if region is None:
            local = is_loopback(endpoint)
            region = build(lambda: new_session(local=local)).region_name or (LOCAL_REGION if local else None)
        if region is None:
            raise ConfigurationError("no AWS region: give --region, for example --region eu-central-1")
        self.place = Place(parts.netloc if parts.scheme == "dynamodb" else "", region, endpoint)
        self.region = self.url = region

    @property
    def settings(self) -> Settings:
        return self._settings

    @property
    def is_local(self) -> bool:
        """Whether a local engine stands for the account."""
        return is_loopback(self.place.endpoint)

    @property
    def local_endpoint(self) -> str | None:
        """URL of the local engine for all services; None: AWS."""
        return self.place.endpoint if self.is_local else None

    def checks(self) -> tuple[Check, ...]:
        return tuple(Check(name, partial(self._answered, name, look)) for name, look in self.looks.items())

    def examine(self, progress: Callable[[str], None] = lambda check: None) -> Iterator[Finding]:
        """Do the checks in their order; `progress` is called with the name of each before it begins."""
        yield from Doctor.examine(self, progress)
        for client in self._made.values():
            client.close()

    def _answered(self, name: str, look: Callable[[Account], Iterator[Finding]]) -> Iterator[Finding]:
        if not self.is_reachable:
            return  # an earlier finding says why
        try:
            yield from look(self)
        except Unanswered as error:
            yield error.finding(name)

    def ask(self, service: str, action: str, **arguments: Any) -> dict[str, Any]:
        """One request, answered within seconds; raises `Unanswered` if it is refused or has no answer."""
        return ask(self._client_of, service, action, arguments)

    def _client_of(self, service: str) -> Any:
        if service not in self._made:
            self._made[service] = self._clients(self.place, self.local_endpoint, attempts=ATTEMPTS)(service)
        return self._made[service]

    def pages(self, service: str, action: str, key: str, **arguments: Any) -> Iterator[dict[str, Any]]:
        """The members of all pages of an answer."""
        while True:
            reply = self.ask(service, action, **arguments)
            yield from reply[key]
            if not (token := reply.get("NextToken")):
                return
            arguments["NextToken"] = token

    def ids(self, *kinds: str) -> Iterator[tuple[Stack, str]]:
        """The physical ids of the resources of these types, each with its stack."""
        for stack in self.stacks:
            yield from ((stack, one["PhysicalResourceId"]) for one in stack.resources if one["ResourceType"] in kinds)

    def given(self, *names: str) -> dict[str, Stack]:
        """The values of these parameters, each with a stack."""
        values = {stack.parameters.get(name, ""): stack for stack in self.stacks for name in names}
        return {value: stack for value, stack in values.items() if value}

    def deploy(self, stack: Stack | None, *more: str) -> str:
        """The command that changes a stack."""
        which = f" --stack {stack.name.removeprefix(f'{self.prefix}-')}" if stack else ""
        where = "--local" if self.is_local else f"--region {self.region}"
        return " ".join([f"scripts/deploy {where} --prefix {self.prefix}{which}", *more])

    def aws(self, words: str) -> str:
        """A command of AWS for this region."""
        return f"aws {words} --region {self.region}" + (f" --endpoint-url {self.place.endpoint}" * self.is_local)
