"""The local DynamoDB: `ministack` as a process in the background, for development and tests.

It listens on the loopback address and keeps its data (DynamoDB and S3) in a folder. It saves while it stops: a kill, or
the end of the machine, loses all changes since its start.
"""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from thunderagent.model.errors import ConfigurationError, StoreError, StoreUnavailable

FOLDER: Final = Path(".thunderagent/local")
HOST: Final = "127.0.0.1"
START_S: Final = 60.0
STOP_S: Final = 30.0
_FORWARDED: Final = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH")
_LIST_TABLES: Final = {
    "X-Amz-Target": "DynamoDB_20120810.ListTables",
    "Content-Type": "application/x-amz-json-1.0",
    "Authorization": "AWS4-HMAC-SHA256 Credential=local/20260101/us-east-1/dynamodb/aws4_request",
}
_processes: dict[int, subprocess.Popen[bytes]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalEngine:
    """A running local DynamoDB."""

    pid: int
    port: int
    folder: Path
    born: str
    """Start of the process by the system: unique together with the pid."""
    started_at: float

    @property
    def endpoint(self) -> str:
        """Address for any AWS client."""
        return f"http://{HOST}:{self.port}"

    @property
    def url(self) -> str:
        """Value for `THUNDERAGENT_STORE`."""
        return f"dynamodb://TaskTable?region=us-east-1&endpoint={self.endpoint}"


def start(folder: Path | str = FOLDER, port: int | None = None) -> LocalEngine:
    """Start the engine of this folder and wait until it answers. An engine that runs already is returned.

    Args:
        folder: of tables, objects, the log and the state file.
        port: a free port of the loopback address; None: the last one if it is free, else any.

    Raises:
        ConfigurationError: the extra `local` is not installed, or the port is taken.
        StoreUnavailable: it did not answer in time; the message ends with its log.
    """
    if find_spec("ministack") is None:
        raise ConfigurationError("the local DynamoDB needs ministack; install with: pip install 'thunderagent[local]'")
    home = Path(folder).absolute()
    home.mkdir(parents=True, exist_ok=True)
    with _only_one(home):
        if engine := status(home):
            if port not in (None, engine.port):
                raise ConfigurationError(f"the local DynamoDB of {home} runs already, on port {engine.port}")
            _await_ready(engine)
            return engine
        engine = _launch(home, _choose_port(home, port))
        try:
            _await_ready(engine)
        except BaseException:
            _end(engine)
            raise
        return engine


def stop(folder: Path | str = FOLDER) -> bool:
    """Stop the engine of this folder, which saves its tables first.

    Returns:
        False if none was running.

    Raises:
        StoreError: it did not stop in time and was killed: changes since its start are lost.
    """
    home = Path(folder).absolute()
    if not home.is_dir():
        return False
    with _only_one(home):
        engine = status(home)
        if engine is None:
            return False
        if not _end(engine):
            raise StoreError(
                f"the local DynamoDB (pid {engine.pid}) did not stop in {STOP_S:g} s and was killed: "
                f"what changed since its start is lost; its log is {_log_file(home)}"
            )
        return True


def status(folder: Path | str = FOLDER) -> LocalEngine | None:
    """The running engine of this folder, or None."""
    engine = _last(Path(folder).absolute())
    return engine if engine and _lives(engine) else None


def _launch(home: Path, port: int) -> LocalEngine:
    temporary = home / "tmp"
    temporary.mkdir(exist_ok=True)
    environment = {name: os.environ[name] for name in _FORWARDED if name in os.environ} | {
        "BIND_HOST": HOST,  # its default is every address of the machine
        "GATEWAY_PORT": str(port),
        "PERSIST_STATE": "1",
        "STATE_DIR": str(home / "state"),
        "S3_PERSIST": "1",
        "S3_DATA_DIR": str(home / "s3"),
        "SFTP_ENABLED": "0",
        "IOT_MTLS_ENABLED": "0",
        "LOG_LEVEL": "WARNING",
        "TMPDIR": str(temporary),
        # With a Docker socket it would remove containers that another ministack of this user started.
        "DOCKER_HOST": f"unix://{temporary / 'no-docker.sock'}",
    }
    with _log_file(home).open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "ministack"],
            cwd=home,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    _processes[process.pid] = process
    born = _born(process.pid) or ""
    engine = LocalEngine(pid=process.pid, port=port, folder=home, born=born, started_at=time.time())
    # Written before it answers: if this process is killed while it waits, the next call still finds the engine.
    part = _state_file(home).with_suffix(".part")
    part.write_text(json.dumps(asdict(engine) | {"folder": str(home)}), encoding="utf-8")
    part.replace(_state_file(home))
    return engine


def _await_ready(engine: LocalEngine) -> None:
    end = time.monotonic() + START_S
    while _lives(engine) and time.monotonic() < end:
        with suppress(OSError, http.client.HTTPException):
            if _answers(engine):
                return
        time.sleep(0.05)
    how = f"did not answer in {START_S:g} s" if _lives(engine) else "ended at once"
    tail = "\n".join(_log_file(engine.folder).read_text(errors="replace").splitlines()[-10:])
    raise StoreUnavailable(f"the local DynamoDB {how}; the end of {_log_file(engine.folder)}:\n{tail}")


def _answers(engine: LocalEngine) -> bool:
    connection = http.client.HTTPConnection(HOST, engine.port, timeout=10)
    try:
        # A request to DynamoDB loads the saved tables, so the first caller does not wait for them.
        connection.request("POST", "/", b"{}", _LIST_TABLES)
        return connection.getresponse().status == 200
    finally:
        connection.close()


def _end(engine: LocalEngine) -> bool:
    """Stop the process. True: it stopped by itself and has saved everything."""
    for number, patience in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, 5.0)):
        if not _lives(engine):
            return True
        with suppress(ProcessLookupError):
            os.kill(engine.pid, number)
        end = time.monotonic() + patience
        while _lives(engine) and time.monotonic() < end:
            time.sleep(0.05)
    return False


def _lives(engine: LocalEngine) -> bool:
    alive = bool(engine.born) and _born(engine.pid) == engine.born
    if not alive and (process := _processes.get(engine.pid)):
        process.poll()  # a child that ended stays a zombie until then
    return alive


def _born(pid: int) -> str | None:
    """The start of a process; None if there is none. A pid alone may belong to a later process."""
    try:
        # Field 2 is the program's name with any text, so fields count from the parenthesis behind it.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        # A zombie with threads still ends, and holds its port until the last thread is gone.
        state, threads, born = fields[0], int(fields[17]), fields[19]
        return None if state == "X" or (state == "Z" and threads <= 1) else born
    except (FileNotFoundError, ProcessLookupError):
        pass
    if Path("/proc/self/stat").exists():
        return None
    asked = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or None


def _choose_port(home: Path, port: int | None) -> int:
    if port is not None:
        if not _is_free(port):
            raise ConfigurationError(f"port {port} of {HOST} is taken; choose another, or none")
        return port
    last = _last(home)
    if last and _is_free(last.port):
        return last.port
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def _last(home: Path) -> LocalEngine | None:
    try:
        state = json.loads(_state_file(home).read_text(encoding="utf-8"))
        return LocalEngine(**state | {"folder": home})
    except (OSError, ValueError, TypeError):
        return None


@contextmanager
def _only_one(home: Path) -> Iterator[None]:
    """Two calls for one folder wait for each other."""
    with (home / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _state_file(home: Path) -> Path:
    return home / "engine.json"


def _log_file(home: Path) -> Path:
    return home / "ministack.log"
