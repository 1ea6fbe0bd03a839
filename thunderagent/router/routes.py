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

from thunderagent.errors import ConfigurationError, EventRejected
from thunderagent.router.problems import listing, problems_of
from thunderagent.router.shapes import EventBridgeEvent, HttpRequest, SnsRecord

_METHOD: Final = re.compile(r"[A-Z]{1,16}")
_PARAMETER: Final = re.compile(r"\{(\w{1,40})\}")
_LONGEST_PATH: Final = 128

AS_IT_IS: Final = (str, bytes)
"""Types of a message or body that is not read as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Route:
    """A function of the user, with the type of its first parameter."""

    function: Callable[[Any, Any], Any]
    content: Any
    adapter: TypeAdapter[Any]

    @property
    def name(self) -> str:
        """The name of the function."""
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
    """For events with this source and this detail type; None is for any."""

    source: str | None
    detail_type: str | None

    def __str__(self) -> str:
        return f"eventbridge(source={self.source!r}, detail_type={self.detail_type!r})"

    def is_for(self, event: EventBridgeEvent) -> bool:
        """True if the event is this route's."""
        return self.source in (None, event.source) and self.detail_type in (None, event.detail_type)

    def overlaps(self, other: EventBridgeRoute) -> bool:
        """True if there can be an event that is for both."""
        pairs = ((self.source, other.source), (self.detail_type, other.detail_type))
        return all(None in pair or pair[0] == pair[1] for pair in pairs)

    def content_of(self, event: EventBridgeEvent) -> Any:
        """The detail, read as the JSON text that it was: in strict models too, dates and the like are text."""
        try:
            text = to_json(event.detail)
        except ValueError:  # half a surrogate pair
            raise EventRejected("the detail is not JSON data") from None
        return self.read(text, "detail")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SnsRoute(Route):
    """For messages of a topic, given by its ARN or, for any account and region, by its name."""

    topic: str

    def __str__(self) -> str:
        return f"sns(topic={self.topic!r})"

    def is_for(self, record: SnsRecord) -> bool:
        """True if the message is this route's."""
        return self.topic in (record.topic, record.topic.rpartition(":")[2])

    def overlaps(self, other: SnsRoute) -> bool:
        """True if there can be a message that is for both."""
        if self.topic.count(":") == other.topic.count(":"):
            return self.topic == other.topic
        return self.topic.rpartition(":")[2] == other.topic.rpartition(":")[2]

    def content_of(self, record: SnsRecord) -> Any:
        """The message: the text itself for a function that takes `str`, else what its JSON holds."""
        return record.message if self.content is str else self.read(_encoded(record.message), "message")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HttpRoute(Route):
    """For requests with this method and a path like this one; `{name}` in it is for any one part."""

    method: str
    path: str

    def __str__(self) -> str:
        return f"http({self.method!r}, {self.path!r})"

    def match(self, path: str) -> Mapping[str, str] | None:
        """The parts that the path of this route names, None if the path is another."""
        wanted, given = self.path.split("/"), path.split("/")
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
        """True if there can be a request that is for both."""
        ours, theirs = self.path.split("/"), other.path.split("/")
        return (
            self.method == other.method
            and len(ours) == len(theirs)
            and all(a == b or "{" in a or "{" in b for a, b in zip(ours, theirs, strict=True))
        )

    def content_of(self, request: HttpRequest) -> Any:
        """The body: as it is for `str` and `bytes`, else what its JSON holds; an empty one is None."""
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
        ConfigurationError: no request can be like that.
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
        ConfigurationError: the function cannot be one of a route.
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
    """What to say when a route is for events that another has."""
    for other in routes:
        if new.overlaps(other):
            return ConfigurationError(
                f"{new} of {new.name} and {other} of {other.name} can both be for the same event; an event has one "
                "route: make them differ, or decide in one function (it may answer with several tasks)"
            )
    return None


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeError:  # half a surrogate pair
        raise EventRejected("the message is not text") from None
