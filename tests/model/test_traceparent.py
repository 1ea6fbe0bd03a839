"""What is taken for a W3C `traceparent`, and what knows it."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thunderagent.model.traceparent import CURRENT, checked, continuing, from_xray, trace_id

TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"
GOOD = f"00-{TRACE}-{SPAN}-01"
HEXADECIMAL = st.text("0123456789abcdef", min_size=32, max_size=32).filter(lambda text: set(text) != {"0"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (GOOD, GOOD),
        (f" {GOOD}\t", GOOD),
        (f"00-{TRACE}-{SPAN}-00", f"00-{TRACE}-{SPAN}-00"),
        (f"01-{TRACE}-{SPAN}-03", GOOD),
        (f"cc-{TRACE}-{SPAN}-02-what-comes-later", f"00-{TRACE}-{SPAN}-00"),
    ],
)
def test_a_traceparent_is_kept_in_the_form_of_version_00(text: str, expected: str) -> None:
    assert checked(text) == expected
    assert trace_id(text) == TRACE


@pytest.mark.parametrize(
    "text",
    [
        None,
        7,
        b"bytes",
        "",
        "nonsense",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-01-",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}0-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}",
        f"00_{TRACE}_{SPAN}_01",
        f"00-{'٣' * 32}-{SPAN}-01",
        f"01-{TRACE}-{SPAN}-01-{'x' * 1000}",
    ],
)
def test_what_is_none_is_dropped_and_no_error(text: object) -> None:
    assert checked(text) is None


@given(st.text())
def test_no_text_is_an_error(text: str) -> None:
    assert checked(text) is None or len(checked(text) or "") == 55
    assert from_xray(text) is None


@given(HEXADECIMAL, HEXADECIMAL.map(lambda text: text[:16]).filter(lambda text: set(text) != {"0"}))
def test_what_was_checked_stays_as_it_is(trace: str, span: str) -> None:
    text = f"00-{trace}-{span}-01"
    assert checked(text) == text
    assert trace_id(text) == trace


def test_the_header_of_xray_names_the_same_trace() -> None:
    root = f"Root=1-{TRACE[:8]}-{TRACE[8:]}"
    assert from_xray(f"{root};Parent={SPAN};Sampled=1;Lineage=a:b") == GOOD
    assert from_xray(f"{root}; Parent={SPAN}; Sampled=0") == f"00-{TRACE}-{SPAN}-00"


@pytest.mark.parametrize(
    "text", [None, "", f"Root=1-{TRACE[:8]}-{TRACE[8:]}", f"Root=x;Parent={SPAN}", "Root=1-a-b;;="]
)
def test_a_header_of_xray_without_a_span_is_none(text: str | None) -> None:
    assert from_xray(text) is None


def test_a_trace_is_known_inside_and_only_there() -> None:
    seen: list[str | None] = []
    with continuing(GOOD):
        assert CURRENT.get() == GOOD
        with continuing(None):
            assert CURRENT.get() == GOOD
        thread = threading.Thread(target=lambda: seen.append(CURRENT.get()))
        thread.start()
        thread.join(10)
    assert CURRENT.get() is None
    assert seen == [None]
