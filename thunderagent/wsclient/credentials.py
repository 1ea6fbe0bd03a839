"""The endpoint of an attempt with a token of its own."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from thunderagent.errors import ConfigurationError
from thunderagent.streaming.endpoint import Attempt, Endpoint, EndpointSource, resolve_endpoint

TokenSource = str | Callable[[Attempt], str | Awaitable[str]]
"""A token, or better a function that gives one for each attempt; `attempt.auth_failed`: the last was refused."""


async def authorised(url: EndpointSource, token: TokenSource, attempt: Attempt) -> Endpoint:
    """Where to connect, with the token in the header; both are asked anew for each attempt, none is kept.

    Raises:
        ConfigurationError: the URL is none of a WebSocket, or the token cannot stand in a header.
    """
    endpoint = await resolve_endpoint(url, attempt)
    given: object = token(attempt) if callable(token) else token
    if inspect.isawaitable(given):
        given = await given
    if not isinstance(given, str) or not given or not given.isascii() or not given.isprintable() or " " in given:
        what = "no text" if not isinstance(given, str) else "empty" if not given else "of letters that no header takes"
        raise ConfigurationError(f"the token is {what}: the token function is to give the text of a JWT")
    return replace(endpoint, headers={**endpoint.headers, "Authorization": f"Bearer {given}"})


def check_source(url: object) -> None:
    """Refuse what can never give a URL.

    Raises:
        ConfigurationError: it is no text, no list of texts and no function.
    """
    listed = [url] if isinstance(url, (str, Endpoint)) else url
    is_list = isinstance(listed, Sequence) and listed and all(isinstance(one, (str, Endpoint)) for one in listed)
    if isinstance(url, bytes) or not (callable(url) or is_list):
        raise ConfigurationError(f"the url is {type(url).__name__}; it is a text, a list of texts, or a function")
