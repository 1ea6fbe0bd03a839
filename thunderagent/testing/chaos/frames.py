"""RFC 6455 without input or output: frames and the handshake, those that the standard allows and some it does not."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from http import HTTPStatus
from typing import Final
from urllib.parse import parse_qs, urlsplit

_GUID: Final = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_SHORT: Final = 125
_NO_CODE: Final = 1005
_MASK: Final = b"\x01\x02\x03\x04"


class Opcode(IntEnum):
    """Kinds of frames; 3 to 7 and 11 to 15 are reserved."""

    CONTINUATION = 0
    TEXT = 1
    BINARY = 2
    CLOSE = 8
    PING = 9
    PONG = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One frame; anything can be written, also what a peer must refuse."""

    opcode: int
    payload: bytes = b""
    last: bool = True
    reserved: int = 0
    """The three reserved bits, 0 to 7."""
    mask: bytes | None = None
    """Four bytes: a client must mask, and a server must not."""

    def encode(self) -> bytes:
        size = len(self.payload)
        masked = 0x80 if self.mask else 0
        head = bytes([(0x80 if self.last else 0) | self.reserved << 4 | self.opcode])
        if size <= _SHORT:
            head += bytes([masked | size])
        elif size < 1 << 16:
            head += bytes([masked | 126]) + size.to_bytes(2, "big")
        else:
            head += bytes([masked | 127]) + size.to_bytes(8, "big")
        return head + self.mask + masking(self.payload, self.mask) if self.mask else head + self.payload


def masking(payload: bytes, mask: bytes) -> bytes:
    """The payload masked, or a masked one unmasked."""
    size = len(payload)
    stream = (mask * (size // 4 + 1))[:size]
    return (int.from_bytes(payload, "big") ^ int.from_bytes(stream, "big")).to_bytes(size, "big")


class FrameParser:
    """Cuts a stream of bytes into frames; masked payloads come out unmasked, and nothing is refused."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that are complete now."""
        self._rest += data
        while (frame := self._one()) is not None:
            yield frame

    def _one(self) -> Frame | None:
        rest = self._rest
        if len(rest) < 2:
            return None
        size, at = rest[1] & 0x7F, 2
        if size > _SHORT:
            at = 4 if size == 126 else 10
            size = int.from_bytes(rest[2:at], "big")
        is_masked = bool(rest[1] & 0x80)
        begin = at + 4 * is_masked
        if len(rest) < begin + size:
            return None
        mask = bytes(rest[at:begin]) if is_masked else None
        payload = bytes(rest[begin : begin + size])
        frame = Frame(
            opcode=rest[0] & 0x0F,
            payload=masking(payload, mask) if mask else payload,
            last=bool(rest[0] & 0x80),
            reserved=rest[0] >> 4 & 7,
            mask=mask,
        )
        del rest[: begin + size]
        return frame


def text_frame(text: str) -> bytes:
    return Frame(opcode=Opcode.TEXT, payload=text.encode()).encode()


def close_frame(code: int | None, reason: str = "") -> bytes:
    """A close frame; without a code it is empty."""
    body = b"" if code is None else code.to_bytes(2, "big") + reason.encode()
    return Frame(opcode=Opcode.CLOSE, payload=body).encode()


def close_code(frame: Frame) -> int:
    """The code in a close frame, 1005 if it holds none."""
    return int.from_bytes(frame.payload[:2], "big") if len(frame.payload) >= 2 else _NO_CODE


class Violation(StrEnum):
    """What a server must not send; a client ends the connection with 1002, or with 1007 because of the text."""

    RESERVED_OPCODE = "reserved opcode"
    RESERVED_BIT = "reserved bit"
    MASKED = "masked frame of a server"
    LONG_PING = "control frame over 125 bytes"
    CUT_PING = "control frame in fragments"
    STRAY_CONTINUATION = "continuation of nothing"
    RESERVED_CLOSE = "close code that is only for programs, 1006"
    INVALID_TEXT = "text that is not UTF-8"


_VIOLATIONS: Final = {
    Violation.RESERVED_OPCODE: Frame(opcode=3, payload=b"x"),
    Violation.RESERVED_BIT: Frame(opcode=Opcode.TEXT, payload=b"x", reserved=4),
    Violation.MASKED: Frame(opcode=Opcode.TEXT, payload=b"x", mask=_MASK),
    Violation.LONG_PING: Frame(opcode=Opcode.PING, payload=b"x" * 126),
    Violation.CUT_PING: Frame(opcode=Opcode.PING, last=False),
    Violation.STRAY_CONTINUATION: Frame(opcode=Opcode.CONTINUATION, payload=b"x"),
    Violation.RESERVED_CLOSE: Frame(opcode=Opcode.CLOSE, payload=(1006).to_bytes(2, "big")),
    Violation.INVALID_TEXT: Frame(opcode=Opcode.TEXT, payload=b"\xc3\x28"),
}


def violating_frame(violation: Violation) -> bytes:
    return _VIOLATIONS[violation].encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The request of a handshake; names of headers are in lower case."""

    path: str
    headers: Mapping[str, str]

    @property
    def key(self) -> str:
        """The stream that is meant: the parameter `stream` of the query, or else the path."""
        parts = urlsplit(self.path)
        return parse_qs(parts.query).get("stream", [parts.path])[0]


def parse_request(head: bytes) -> Request | None:
    """The request in the bytes up to and with the empty line, None if it is no GET of HTTP."""
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or words[0] != "GET" or not words[2].startswith("HTTP/"):
        return None
    pairs = (line.partition(":") for line in lines if line)
    return Request(path=words[1], headers={name.strip().lower(): value.strip() for name, _, value in pairs})


def accepting(request: Request, *, right: bool = True) -> bytes:
    """The answer that opens the WebSocket; not `right`: with the answer to another key."""
    key = request.headers.get("sec-websocket-key", "") if right else "another"
    digest = hashlib.sha1((key + _GUID).encode(), usedforsecurity=False).digest()
    accept = base64.b64encode(digest).decode()
    return response(101, {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Accept": accept})


def response(status: int, headers: Mapping[str, str], body: str = "") -> bytes:
    """An answer of HTTP; with a length and `Connection: close`, unless it is the 101."""
    phrase = HTTPStatus(status).phrase if status in set(HTTPStatus) else "Unknown"
    content = body.encode()
    whole = dict(headers)
    if status != HTTPStatus.SWITCHING_PROTOCOLS:
        whole = {"Content-Length": str(len(content)), "Connection": "close"} | whole
    lines = [f"HTTP/1.1 {status} {phrase}", *(f"{name}: {value}" for name, value in whole.items()), "", ""]
    return "\r\n".join(lines).encode("latin-1") + content
