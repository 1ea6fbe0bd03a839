"""A WebSocket server that is not ours: `ws` for node, with what feeds of other people do to a client."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest

from tests.support.engine import LONG_S

SERVER: Final = r"""
const http = require('http'), zlib = require('zlib');
const Server = require(process.argv[1]).wsServer;
const wss = new Server({ noServer: true });
const asked = {};
const say = (socket, value) => socket.send(JSON.stringify(value));
const ticks = (socket, number) => { for (let n = 1; n <= number; n++) say(socket, { n }); };

const feeds = {
  '/leaves': socket => { ticks(socket, 20); socket.close(1001); },
  '/echo': socket => socket.on('message', text => say(socket, { n: 1, got: text.toString() })),
  '/refuses-symbol': socket => {
    say(socket, { type: 'welcome' });
    socket.on('message', () => say(socket, { type: 'error', message: 'unknown symbol XYZ' }));
  },
  '/zipped': socket => socket.on('message', () => {
    for (const value of [{ op: 'subscribed' }, { n: 1 }]) socket.send(zlib.deflateSync(JSON.stringify(value)));
  }),
  '/pings': socket => {
    let answered = true, number = 0;
    const timer = setInterval(() => {
      if (!answered) return socket.close(4008, 'no pong');
      answered = false;
      say(socket, { op: 'ping', id: ++number });
    }, 250);
    ticks(socket, 40);
    socket.on('message', text => { answered = JSON.parse(text).pong === number; });
    socket.on('close', () => clearInterval(timer));
  },
  '/wants-pings': socket => {
    let timer;
    const again = () => { clearTimeout(timer); timer = setTimeout(() => socket.close(4009, 'no ping'), 400); };
    ticks(socket, 40);
    again();
    socket.on('message', text => { if (text.toString() === 'ping') again(); });
    socket.on('close', () => clearTimeout(timer));
  },
};

const server = http.createServer();
server.on('upgrade', (request, socket, head) => {
  const url = new URL(request.url, 'http://peer'), left = Number(url.searchParams.get('refusals') || 0);
  asked[request.url] = (asked[request.url] || 0) + 1;
  if (asked[request.url] <= left) {
    const status = url.searchParams.get('status');
    return socket.end(`HTTP/1.1 ${status} No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n`);
  }
  wss.handleUpgrade(request, socket, head, opened => feeds[url.pathname](opened));
});
server.listen(0, '127.0.0.1', () => console.log(JSON.stringify(server.address().port)));
process.stdin.on('end', () => process.exit(0)).resume();
"""


def _parts() -> tuple[Path, Path]:
    """Node, and the bundle with `ws`, of the browser tests' own package."""
    spec = find_spec("playwright")
    driver = Path(spec.origin or "").parent / "driver" if spec else Path()
    return driver / "node", driver / "package" / "lib" / "utilsBundle.js"


@contextmanager
def foreign_server() -> Iterator[str]:
    """The URL of a server of node's `ws`; skips where there is none."""
    node, bundle = _parts()
    if not (node.exists() and bundle.exists()):
        pytest.skip("needs node and its package ws, which come with playwright")
    with subprocess.Popen(
        [node, "-e", SERVER, str(bundle)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            bound = threading.Timer(LONG_S, process.kill)
            bound.start()
            line = process.stdout.readline()
            bound.cancel()
            if not line:
                pytest.skip("the package ws is not where it was in this version of playwright")
            yield f"ws://127.0.0.1:{json.loads(line)}"
        finally:
            process.kill()
