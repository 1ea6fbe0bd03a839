"""Messages of clients as typed data. A refusal says what would be right."""

from __future__ import annotations

import json
from typing import Any, Final, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from thunderagent.websocket_api.protocol import ID_LETTERS, MESSAGE_BYTES, Action, Problem, size
from thunderagent.websocket_api.server.answers import MessageId, Refusal

DEEPEST: Final = 64
"""Most objects and lists inside each other in a patch."""

M = TypeVar("M", bound="Message")


class Message(BaseModel):
    """A message. Unknown fields are ignored: a newer client may send them."""

    model_config = ConfigDict(extra="ignore", strict=True, hide_input_in_errors=True)

    id: MessageId = None


class GetState(Message):
    known_version: int = Field(0, ge=0, lt=2**53)


class SetState(Message):
    version: int = Field(ge=0, lt=2**53)
    change: str = Field(min_length=1, max_length=ID_LETTERS)
    patch: dict[str, Any]


def read(text: str) -> dict[str, Any]:
    """The message in a text; raises `Refusal` for a text that is too large or no JSON object."""
    if (found := size(text)) > MESSAGE_BYTES:
        raise Refusal(Problem.TOO_LARGE, f"the message has {found} bytes; at most {MESSAGE_BYTES} are taken")
    try:
        data = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise Refusal(Problem.BAD_REQUEST, f"the message is no JSON ({error}); {_EXAMPLE}") from None
    if not isinstance(data, dict):
        raise Refusal(Problem.BAD_REQUEST, f"the message is no JSON object; {_EXAMPLE}")
    return data


def id_of(data: dict[str, Any]) -> MessageId:
    """The id of a message, which its reply repeats; raises `Refusal` for a wrong one."""
    found = data.get("id")
    if found is None or (isinstance(found, str) and len(found) <= ID_LETTERS) or _is_whole(found):
        if isinstance(found, str) and not found.isascii():
            _check_text(found, "id", None)
        return found
    raise Refusal(Problem.BAD_REQUEST, f"id: a text of up to {ID_LETTERS} letters, or a whole number")


def typed(kind: type[M], data: dict[str, Any], message_id: MessageId) -> M:
    """The message as the type of its action; raises `Refusal` for a missing or wrong field."""
    try:
        message = kind.model_validate(data)
    except (ValidationError, RecursionError) as error:
        raise Refusal(Problem.BAD_REQUEST, _listing(error), message_id) from None
    if isinstance(message, SetState):
        _check_text(message.change, "change", message_id)
        if _depth(message.patch) > DEEPEST:
            text = f"patch: objects and lists lie more than {DEEPEST} deep in each other"
            raise Refusal(Problem.BAD_REQUEST, text, message_id)
    return message


def unknown(action: object, message_id: MessageId) -> Refusal:
    """The refusal of an unknown action."""
    known = ", ".join(Action)
    shown = repr(action)[:80] if isinstance(action, str) else "none"
    return Refusal(
        Problem.UNKNOWN_ROUTE,
        f"the action is {shown.encode('ascii', 'replace').decode()}; known are {known}",
        message_id,
    )


_EXAMPLE: Final = 'send for example {"action":"getState","id":1}'


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53


def _check_text(text: str, name: str, message_id: MessageId) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Refusal(Problem.BAD_REQUEST, f"{name}: half a surrogate pair is no text", message_id) from None


def _listing(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return "the message is nested too deeply"
    problems = [f"{'.'.join(map(str, one['loc'])) or 'message'}: {one['msg']}" for one in error.errors()[:5]]
    return "; ".join(problems).encode("ascii", "replace").decode()


def _depth(value: Any) -> int:
    """The depth of a value, at most `DEEPEST` + 1; without recursion."""
    deepest, left = 0, [(value, 1)]
    while left:
        one, depth = left.pop()
        deepest = max(deepest, depth)
        if deepest > DEEPEST:
            break
        if isinstance(one, dict):
            left += [(member, depth + 1) for member in one.values()]
        elif isinstance(one, list):
            left += [(member, depth + 1) for member in one]
    return deepest


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
