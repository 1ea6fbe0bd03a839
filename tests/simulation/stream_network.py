"""Event loops, a network and a WebSocket server in one thread, on a clock that moves by hand.

Each process of the simulation has a `SimLoop` of its own, so that one of them can stand still or die while the others
go on. Nothing here waits and nothing is random: what happens next is decided by whoever steps the loops.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any, Final

from thunderagent.testing import FakeClock
from thunderagent.testing.chaos import ChaosServer

HOST: Final = "127.0.0.1"
_ROUNDING_S: Final = 1e-9


class _Selector:
    """Nothing comes from outside."""

    def select(self, timeout: float | None = None) -> list[Any]:
        return []

    def close(self) -> None: ...


class SimLoop(asyncio.BaseEventLoop):
    """The event loop of one process: it runs one iteration at a time, when it is told to."""

    def __init__(self, clock: FakeClock, network: Network, name: str) -> None:
        super().__init__()
        self._inner: Any = self  # what is used here of the base class is not in its stubs
        vars(self)["_selector"] = _Selector()
        self._sim_clock = clock
        self.network = network
        self.name = name
        self.problems: list[str] = []
        self._slept_s = 0.0
        self.set_exception_handler(self._note)

    def time(self) -> float:
        return self._sim_clock.monotonic() - self._slept_s

    def sleep(self, seconds: float) -> None:
        """Its machine is suspended for so long: its clock stands still, and it is not stepped."""
        self._slept_s += seconds

    @property
    def next_at(self) -> float:
        """Second at which it has something to do; infinity: nothing."""
        if self._inner._ready:
            return self._sim_clock.monotonic()
        scheduled = self._inner._scheduled
        return float(scheduled[0]._when) + self._slept_s if scheduled else float("inf")

    def is_due(self) -> bool:
        """True when an iteration would do something."""
        return self.next_at <= self._sim_clock.monotonic() + _ROUNDING_S

    def step(self) -> None:
        """One iteration."""
        self.call_soon(self.stop)
        self.run_forever()

    def close(self) -> None:
        if not self.is_closed():
            super().close()

    async def create_connection(  # type: ignore[override] # what `websockets` uses of it
        self, factory: Any, host: Any = None, port: Any = None, **_: Any
    ) -> Any:
        await asyncio.sleep(0)
        return self.network.connect(self, factory, port)

    async def connect_accepted_socket(  # type: ignore[override] # what the chaos server uses of it
        self, factory: Any, sock: Any, **_: Any
    ) -> Any:
        wire: Wire = sock.wire
        wire.attach(factory())
        return wire, wire.get_protocol()

    def _process_events(self, events: list[Any]) -> None: ...

    def _write_to_self(self) -> None: ...

    def _note(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.problems.append(f"{self.name}: {context['message']}: {error!r}")


class Mark(Enum):
    """What can come over a wire beside data."""

    EOF = "eof"
    RESET = "reset"


class WireSocket:
    """What is asked of the socket of a wire."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.lingers = True

    def setsockopt(self, level: int, option: int, value: Any) -> None:
        if isinstance(value, bytes):  # SO_LINGER with no time: the end is a reset
            self.lingers = False

    def setblocking(self, _: bool) -> None: ...

    def close(self) -> None:
        self.wire.die(Mark.EOF if self.lingers else Mark.RESET)


class Wire(asyncio.Transport):
    """One end of a connection. What is written is at the other end at once, and read when that loop runs."""

    def __init__(self, loop: SimLoop, port: int) -> None:
        super().__init__()
        self.loop = loop
        self.port = port
        self.sock = WireSocket(self)
        self.peer: Wire
        self._protocol: Any = None
        self._came: deque[bytes | Mark] = deque()
        self._is_reading = True
        self._is_scheduled = False
        self.is_ended = False

    @property
    def is_open(self) -> bool:
        """False as soon as one of the ends was closed."""
        return not self.is_ended and not self.peer.is_ended

    def attach(self, protocol: Any) -> None:
        """Who reads."""
        self._protocol = protocol
        protocol.connection_made(self)
        self._wake()

    def die(self, mark: Mark) -> None:
        """The process at this end lets go without a word to its own protocol."""
        if not self.is_ended:
            self.is_ended = True
            self.peer.arrive(mark)

    def arrive(self, what: bytes | Mark) -> None:
        """Something comes from the other end."""
        if what is Mark.RESET:
            self._came.clear()
        self._came.append(what)
        self._wake()

    # The transport

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self.sock if name == "socket" else default

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        protocol: asyncio.BaseProtocol = self._protocol
        return protocol

    def is_closing(self) -> bool:
        return self.is_ended

    def is_reading(self) -> bool:
        return self._is_reading

    def pause_reading(self) -> None:
        self._is_reading = False

    def resume_reading(self) -> None:
        self._is_reading = True
        self._wake()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self.is_open and data:
            self.peer.arrive(bytes(data))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        if self.is_open:
            self.peer.arrive(Mark.EOF)

    def close(self) -> None:
        self._end(Mark.EOF, None)

    def abort(self) -> None:
        self._end(Mark.EOF if self.sock.lingers else Mark.RESET, None)

    def _end(self, mark: Mark, error: Exception | None) -> None:
        if not self.is_ended:
            self.die(mark)
            if self._protocol is not None:
                self.loop.call_soon(self._protocol.connection_lost, error)

    def _wake(self) -> None:
        if not self._is_scheduled and self._protocol is not None and not self.loop.is_closed():
            self._is_scheduled = True
            self.loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        self._is_scheduled = False
        if not (self._came and self._is_reading and not self.is_ended):
            return
        what = self._came.popleft()
        self._wake()
        if isinstance(what, bytes):
            self._protocol.data_received(what)
        elif what is Mark.RESET:
            self._end(Mark.EOF, ConnectionResetError(104, "reset by the peer"))
        elif not self._protocol.eof_received():
            self.close()


class Network:
    """Who listens, and the wires between clients and them."""

    def __init__(self) -> None:
        self._listeners: dict[int, Callable[[WireSocket], None]] = {}
        self._loops: dict[int, SimLoop] = {}
        self.wires: list[Wire] = []
        """The clients' ends of all connections that are not over."""
        self.connecting: Callable[[Wire], None] = lambda wire: None
        """Told of each new connection, at the client's end."""

    def listen(self, port: int, loop: SimLoop, came: Callable[[WireSocket], None]) -> None:
        """Accept connections in this loop."""
        self._listeners[port], self._loops[port] = came, loop

    def unlisten(self, port: int) -> None:
        """Refuse connections."""
        self._listeners.pop(port, None)

    def open_of(self, loop: SimLoop, port: int) -> int:
        """Connections of a process that are open."""
        return sum(wire.is_open for wire in self.wires if wire.loop is loop and wire.port == port)

    def connect(self, loop: SimLoop, factory: Callable[[], Any], port: int) -> tuple[Wire, Any]:
        """Open a connection.

        Raises:
            ConnectionRefusedError: nobody listens.
        """
        if (came := self._listeners.get(port)) is None:
            raise ConnectionRefusedError(111, "refused")
        self.wires = [wire for wire in self.wires if wire.is_open]
        near, far = Wire(loop, port), Wire(self._loops[port], port)
        near.peer, far.peer = far, near
        self.connecting(near)
        self.wires.append(near)
        far.loop.call_soon(came, far.sock)
        near.attach(factory())
        return near, near.get_protocol()

    def drop(self, loop: SimLoop) -> None:
        """The process of this loop has died: the system resets its connections."""
        for wire in self.wires:
            if wire.loop is loop:
                wire.die(Mark.RESET)


class SimServer(ChaosServer):
    """The chaos server on this network. There is one for each stream, so that each has faults of its own."""

    def __init__(self, network: Network, loop: SimLoop, port: int) -> None:
        super().__init__(from_start=True, port=port)
        self._network, self._loop = network, loop
        self.listen_again()

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._port

    @property
    def failures(self) -> list[BaseException]:
        """What went wrong in the server itself."""
        return self._failures

    def stop_listening(self) -> None:
        self._network.unlisten(self._port)

    def listen_again(self) -> None:
        self._network.listen(self._port, self._loop, self._came)

    def _came(self, sock: Any) -> None:
        task = asyncio.create_task(self._serve(sock, self.came()), name="chaos connection")
        self._tasks[task] = None
        task.add_done_callback(self._served)
