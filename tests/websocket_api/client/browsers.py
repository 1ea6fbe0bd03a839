"""Chromium for tests: the system's own, started afresh, with nothing that reaches the network."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final

import pytest

from thunderagent.stores.engine import Engine
from thunderagent.stores.sqlite.engine import MEMORY, SqliteEngine
from thunderagent.websocket_api.gateway.events import Limits
from thunderagent.websocket_api.gateway.gateway import Gateway, in_thread
from thunderagent.websocket_api.gateway.issuer import Issuer
from thunderagent.websocket_api.gateway.pages import Pages

pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
from playwright.sync_api import Browser as Browser
from playwright.sync_api import Page as Page
from playwright.sync_api import sync_playwright

FLAGS: Final = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)
NAMES: Final = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")


def chromium() -> str | None:
    """Where the browser is, None if there is none."""
    return next((found for name in NAMES if (found := shutil.which(name, path=f"{os.environ['PATH']}:/usr/bin"))), None)


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser; the test is skipped if there is none."""
    path = chromium()
    if path is None:
        pytest.skip(f"no Chromium: none of {', '.join(NAMES)} is installed; on Debian: apt-get install chromium")
    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=path, args=list(FLAGS), timeout=60_000)
        try:
            yield opened
        finally:
            opened.close()


@contextmanager
def gateways(
    names: Sequence[str], limits: Limits | None = None, *, states: Sequence[Engine] = ()
) -> Iterator[list[Gateway]]:
    """Regions of a demo, in a thread. They share their states, or have the tables that are given, one each."""
    issuer = Issuer()
    pages = Pages(issuer=issuer)
    with ExitStack() as stack:

        def engine() -> SqliteEngine:
            opened = SqliteEngine(MEMORY)
            stack.callback(opened.close)
            return opened

        tables = states or [engine()] * len(names)
        opened = [
            Gateway(table, engine(), region=name, authorizer=issuer.authorizer(), limits=limits, pages=pages)
            for name, table in zip(names, tables, strict=True)
        ]
        pages.regions = list(opened)
        stack.enter_context(in_thread(*opened))
        yield opened


def issuer_of(gateway: Gateway) -> Issuer:
    """Who signs the tokens of a demo."""
    issuer = gateway.pages.issuer
    assert issuer is not None
    return issuer
