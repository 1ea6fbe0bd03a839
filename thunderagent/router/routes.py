"""Routes: which events a function is for, and what it takes. Two routes are never for the same event."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

from pydantic import BaseModel, PydanticUndefinedAnnotation, PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import to_json

from thunderagent.model.errors import ConfigurationError, EventRejected
from thunderagent.router.events import (
    KINDS,
    S3,
    SCHEDULER,
    EventBridgeEvent,
    HttpRequest,
    Invocation,
    S3Event,
    S3Kind,
    SnsRecord,
    SqsMessage,
)
from thunderagent.router.problems import listing, problems_of

_METHOD: Final = re.compile(r"[A-Z]{1,16}")
_PARAMETER: Final = re.compile(r"\{(\w{1,40})\}")
_LONGEST_PATH: Final = 128

AS_IT_IS: Final = (str, bytes)
"""Types that take a message or body as it is, not as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Route:
    """A function of the user, with the type of its first parameter.

    Each kind of route answers `is_for(event)`, and `overlaps(other)`: whether one event can be for both.
    """

    function: Callable[[Any, Any], Any]
    content: Any
    adapter: TypeAdapter[Any]

    @property
    def name(self) -> str:
        return str(getattr(self.function, "__qualname__", self.function))

    def read(self, text: bytes | str, root: str) -> Any:
        """The first argument of the function, from JSON text.

        Raises:
            EventRejected: the text is not JSON or does not fit the type.
        """
        try:
            return self.adapter.validate_json(text)
        except ValidationError as error:
            problems = problems_of(error, root)
            raise EventRejected(f"the {root} does not fit: {listing(problems)}", problems=problems) from None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EventBridgeRoute(Route):
    """For events with this source and detail type; None is any."""

    source: str | None
    detail_type: str | None

    def __str__(self) -> str:
        return f"eventbridge(source={self.source!r}, detail_type={self.detail_type!r})"

    def is_for(self, event: EventBridgeEvent) -> bool:
        return self.source in (None, event.source) and self.detail_type in (None, event.detail_type)

    def overlaps(self, other: EventBridgeRoute) -> bool:
        pairs = ((self.source, other.source), (self.detail_type, other.detail_type))
        return all(None in pair or pair[0] == pair[1] for pair in pairs)

    def content_of(self, event: EventBridgeEvent) -> Any:
        """The detail, read from JSON text, so that a strict model takes dates and the like.

        EventBridge Scheduler sends the detail as a text that holds JSON.
        """
        if event.source == SCHEDULER and isinstance(event.detail, str):
            return event.detail if self.content is str else self.read(_encoded(event.detail, "detail"), "detail")
        return self.read(_json(event.detail, "detail"), "detail")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class S3Route(Route):
    """For events of the objects of a bucket, from S3 or through EventBridge."""

    bucket: str
    kind: S3Kind | None

    def __str__(self) -> str:
        return f"s3(bucket={self.bucket!r}, kind={self.kind!r})"

    def is_for(self, event: S3Event) -> bool:
        return self.bucket == event.object.bucket and self.kind in (None, event.kind)

    def overlaps(self, other: S3Route | EventBridgeRoute) -> bool:
        if isinstance(other, S3Route):
            return self.bucket == other.bucket and (None in (self.kind, other.kind) or self.kind == other.kind)
        if other.source not in (None, S3):
            return False
        name = other.detail_type
        return name is None or (name.startswith("Object ") if self.kind is None else name in KINDS[self.kind])

    def content_of(self, event: S3Event) -> Any:
        return self.read(_json(event.object.model_dump(), "object"), "object")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InvokeRoute(Route):
    """For an input that the caller of the function chose: all that is no event of another kind."""

    def __str__(self) -> str:
        return "invoke()"

    def is_for(self, event: Invocation) -> bool:
        return True

    def overlaps(self, other: InvokeRoute) -> bool:
        return True

    def content_of(self, event: Invocation) -> Any:
        return self.read(_json(event.content, "input"), "input")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _AddressRoute(Route):
    """For messages of an address: its ARN, or its name in any account and region."""

    address: str

    def is_of(self, arn: str) -> bool:
        return self.address in (arn, arn.rpartition(":")[2])

    def overlaps(self, other: _AddressRoute) -> bool:
        if self.address.count(":") == other.address.count(":"):
            return self.address == other.address
        return self.address.rpartition(":")[2] == other.address.rpartition(":")[2]

    def message(self, text: str) -> Any:
        """The text itself for a function that takes `str`, else its JSON."""
        return text if self.content is str else self.read(_encoded(text, "message"), "message")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SnsRoute(_AddressRoute):
    def __str__(self) -> str:
        return f"sns(topic={self.address!r})"

    def is_for(self, record: SnsRecord) -> bool:
        return self.is_of(record.topic)

    def content_of(self, record: SnsRecord) -> Any:
        return self.message(record.message)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SqsRoute(_AddressRoute):
    def __str__(self) -> str:
        return f"sqs(queue={self.address!r})"

    def is_for(self, message: SqsMessage) -> bool:
        return self.is_of(message.queue)

    def content_of(self, message: SqsMessage) -> Any:
        return self.message(message.body)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HttpRoute(Route):
    """For requests with this method and path; `{name}` in it is any one part."""

    method: str
    path: str

    def __str__(self) -> str:
        return f"http({self.method!r}, {self.path!r})"

    def match(self, path: str) -> Mapping[str, str] | None:
        """The named parts of a path, None if the path is another. A slash at the end does not count."""
        wanted, given = _parts(self.path), _parts(path)
        if len(wanted) != len(given):
            return None
        found: dict[str, str] = {}
        for pattern, part in zip(wanted, map(unquote, given), strict=True):
            if parameter := _PARAMETER.fullmatch(pattern):
                if not part:
                    return None
                found[parameter[1]] = part
            elif pattern != part:
                return None
        return found

    def overlaps(self, other: HttpRoute) -> bool:
        ours, theirs = _parts(self.path), _parts(other.path)
        return (
            self.method == other.method
            and len(ours) == len(theirs)
            and all(a == b or "{" in a or "{" in b for a, b in zip(ours, theirs, strict=True))
        )

    def content_of(self, request: HttpRequest) -> Any:
        """The body as it is for `str` and `bytes`, else its JSON; an empty one is None."""
        if self.content is bytes:
            return request.body
        if self.content is str:
            try:
                return request.body.decode()
            except UnicodeDecodeError:
                raise EventRejected("the body is not text in UTF-8") from None
        return self.read(request.body or b"null", "body")


def one_http_path(method: str, path: str) -> tuple[str, str]:
    """The method and path of a route, checked.

    Raises:
        ConfigurationError: no request can have them.
    """
    method = method.upper()
    if not _METHOD.fullmatch(method):
        raise ConfigurationError(f"{method!r} is no HTTP method; write for example 'POST'")
    names = _PARAMETER.findall(path)
    parts = path.split("/")[1:]
    is_plain = all(_PARAMETER.fullmatch(part) or not set(part) & set("{}?#% ") for part in parts)
    if not path.startswith("/") or not is_plain or not path.isprintable() or len(path) > _LONGEST_PATH:
        raise ConfigurationError(
            f"{path!r} is no path of a route; write for example '/orders' or '/orders/{{order_id}}', with at most "
            f"{_LONGEST_PATH} characters and whole parts in braces"
        )
    if len(set(names)) < len(names):
        raise ConfigurationError(f"the path {path!r} has the same name twice")
    return method, path


def parameter_types(function: Callable[..., Any], kind: type[BaseModel]) -> tuple[Any, TypeAdapter[Any]]:
    """The type of the first parameter of a route's function, and how to read it.

    Raises:
        ConfigurationError: the function cannot be a route.
    """
    name = getattr(function, "__qualname__", repr(function))
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise ConfigurationError(f"the route {name} must be a plain function that returns what is to be enqueued")
    parameters = list(inspect.signature(function).parameters)
    if len(parameters) != 2:
        raise ConfigurationError(
            f"the route {name} must take two parameters, the typed content and the {kind.__name__}"
        )
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ConfigurationError(
            f"the annotations of the route {name} cannot be resolved ({error}); define its types at the top of the "
            "module"
        ) from error
    if parameters[0] not in hints:
        raise ConfigurationError(f"annotate the parameter {parameters[0]!r} of the route {name} with its type")
    if hints.get(parameters[1], kind) not in (kind, Any, object):
        raise ConfigurationError(f"the parameter {parameters[1]!r} of the route {name} gets a {kind.__name__}")
    try:
        adapter = TypeAdapter(hints[parameters[0]])
        adapter.rebuild(raise_errors=True)  # a model that lacks one of its types would fail with the first event
        return hints[parameters[0]], adapter
    except (PydanticUserError, PydanticUndefinedAnnotation) as error:
        raise ConfigurationError(f"the route {name} takes a type that pydantic cannot read: {error}") from error


def clash(new: Any, routes: Iterable[Any]) -> ConfigurationError | None:
    """The error when another route takes some of the same events."""
    for other in routes:
        one, two = (other, new) if isinstance(other, S3Route) else (new, other)
        if one.overlaps(two):
            return ConfigurationError(
                f"{new} of {new.name} and {other} of {other.name} can both be for the same event; an event has one "
                "route: make them differ, or decide in one function (it may answer with several tasks)"
            )
    return None


def one_address(service: str, kind: str, address: str) -> str:
    """The address of a route, checked.

    Raises:
        ConfigurationError: it is neither a name nor an ARN.
    """
    if not address or address.count(":") not in (0, 5):
        raise ConfigurationError(
            f"{address!r} is no {kind}; write its ARN, arn:aws:{service}:REGION:ACCOUNT:NAME, or its name"
        )
    return address


def _parts(path: str) -> list[str]:
    return path.removesuffix("/").split("/")


def _encoded(text: str, root: str) -> bytes:
    try:
        return text.encode()
    except UnicodeError:  # half a surrogate pair
        raise EventRejected(f"the {root} is not text") from None


def _json(data: Any, root: str) -> bytes:
    try:
        return to_json(data)
    except ValueError:  # half a surrogate pair
        raise EventRejected(f"the {root} is not JSON data") from None
