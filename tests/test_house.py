"""The house: imports between rooms go down, and what only one room may do stays there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import pytest

import thunderagent

PACKAGE: Final = Path(thunderagent.__file__).parent

ORDER: Final = (
    "model",
    "settings",
    "stores jobs",
    "regions streams",
    "telemetry",
    "queue",
    "agent client",
    "router ops",
    "__init__",
    "websocket_api",
    "cli testing",
    "__main__",
)
"""Rooms from bottom to top; `__init__` is the public face. Rooms on one floor do not import each other."""

FLOORS: Final = {room: floor for floor, rooms in enumerate(ORDER) for room in rooms.split()}

INSIDE: Final[dict[str, tuple[str, ...]]] = {
    "agent": (
        "admission core executors.child_end executors.threads health.judgement poller settle sweep threads",
        "doubts ec2 executors.loop executors.process health.file health.probes heartbeat pauses scopes stream_balance",
        "doorbell executors executors.child health.monitor queues recycling stream_handoff suspects",
        "candidates",
        "health.outage in_flight",
        "health.vitals streams",
        "housekeeping view",
        "regions",
        "assembly",
        "loop",
    ),
    "queue": (
        "doorbell.message limits.permits pauses sweeps unique",
        "doorbell.port dependents limits.waitlist",
        "doorbell.memory doorbell.sender doorbell.sqs doorbell.unix enqueue limits.freed stats schedules.scheduler",
        "doorbell commands pause_commands schedules.commands",
        "stream_commands",
    ),
    "streams": (
        "cursor connection.ending connection.resolver",
        "connection.endpoint connection.governor connection.track connection.verdicts journal",
        "connection.options",
        "connection.buffer connection.liveness connection.transport",
        "connection.connection",
        "connection.pump connection.sequencer",
        "connection.feed",
        "context",
        "job",
    ),
}
"""Floors inside a room, from bottom to top; a folder's name is its `__init__`. Modules on one floor do not import
each other."""

LONGEST: Final = 500
LONGER: Final[dict[str, tuple[int, str]]] = {
    "stores.tasks": (
        545,
        "every verb of the queue, with what becomes of a claim without an answer or of an unreadable row",
    ),
    "model.task": (520, "the task, its one reader, and its place in the index"),
    "agent.in_flight": (540, "all that changes what an agent holds, in the order in which it happens"),
    "model.writes.tasks": (600, "every conditional write of the queue stands here, once and nowhere else"),
}
"""Modules over 500 lines: how long they may be, and why they are."""


def modules() -> dict[str, Path]:
    """Every module of the package by its name below it, as in `INSIDE`."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
        if len(parts) > 1 and parts[-1] == "__init__":
            del parts[-1]
        found[".".join(parts)] = path
    return found


MODULES: Final = modules()


def room(name: str) -> str:
    """The room of a module or of an import of ours."""
    return name.removeprefix("thunderagent").removeprefix(".").partition(".")[0] or "__init__"


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


def imported(parsed: ast.AST, package: str = "thunderagent") -> Iterator[tuple[int, str]]:
    """Line and dotted name of each import, in functions and in TYPE_CHECKING blocks too."""
    for node in ast.walk(parsed):
        if isinstance(node, ast.Import):
            for one in node.names:
                yield node.lineno, one.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: write the whole name of {node.module}"
            for one in node.names:
                whole = f"{node.module}.{one.name}"
                is_module = whole.removeprefix(f"{package}.") in MODULES and whole.startswith(f"{package}.")
                yield node.lineno, whole if is_module else str(node.module)


def upward(name: str, parsed: ast.AST) -> list[str]:
    """Imports from a room above, or from another room of the same floor."""
    here = room(name)
    return [
        f"{name}:{line} imports {dotted}"
        for line, dotted in imported(parsed)
        if dotted.partition(".")[0] == "thunderagent"
        and (there := room(dotted)) != here
        and {here, there} <= FLOORS.keys()
        and FLOORS[there] >= FLOORS[here]
    ]


@pytest.mark.slow
def test_imports_between_rooms_only_go_down() -> None:
    assert [found for name in MODULES for found in upward(name, tree(name))] == []


@pytest.mark.parametrize(
    "text",
    [
        "from thunderagent.agent.loop import Agent",
        "import thunderagent.agent.loop",
        "from thunderagent.agent import loop",
        "from thunderagent import agent",
        "from thunderagent import Agent",
        "def f():\n    from thunderagent.client import Client",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from thunderagent.cli.output import out",
        "try:\n    pass\nfinally:\n    import thunderagent.telemetry.logs as t",
    ],
)
def test_an_upward_import_is_found_wherever_it_hides(text: str) -> None:
    assert len(upward("model.task", ast.parse(text))) == 1


def test_imports_from_below_are_not_taken_for_upward_ones() -> None:
    text = "from thunderagent.model import events\nfrom thunderagent.stores.tasks import TaskStore\nimport json"
    assert upward("agent.heartbeat", ast.parse(text)) == []


LAMBDA: Final = frozenset({"router.function", "websocket_api.canary.function", "websocket_api.server.functions"})
"""Modules whose functions AWS Lambda calls: they import what they need, and nothing imports them."""


def test_nothing_imports_a_lambda_function() -> None:
    found = {dotted.removeprefix("thunderagent.") for name in MODULES for _, dotted in imported(tree(name))}
    assert MODULES.keys() >= LAMBDA
    assert not LAMBDA & found


def ours(name: str) -> set[str]:
    """The modules of ours that a module imports."""
    found = {dotted.removeprefix("thunderagent").removeprefix(".") for _, dotted in imported(tree(name))}
    return {one or "__init__" for one in found} & MODULES.keys() - {name}


@pytest.mark.parametrize("room", INSIDE)
def test_imports_inside_a_room_only_go_down(room: str) -> None:
    floors = {f"{room}.{one}": floor for floor, several in enumerate(INSIDE[room]) for one in several.split()}
    inside = {name for name in MODULES if name.startswith(f"{room}.") and ours(name) | floors.keys() & {name}}
    assert inside == floors.keys(), "each module that imports others of ours has its floor, and no other"
    wrong = [f"{name} imports {one}" for name in inside for one in ours(name) & inside if floors[one] >= floors[name]]
    assert wrong == []


def test_imports_make_no_circle() -> None:
    left = {name: ours(name) for name in MODULES}
    while lowest := {name for name, below in left.items() if not below & left.keys()}:
        left = {name: below for name, below in left.items() if name not in lowest}
    assert left == {}


def bound(parsed: ast.Module) -> Iterator[str]:
    """The names that a module defines, or imports from another."""
    for node in parsed.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom):
            whole = {
                one.asname or one.name: f"{node.module}.{one.name}".removeprefix("thunderagent.") for one in node.names
            }
            yield from (here for here, there in whole.items() if there not in MODULES)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (one.id for one in targets if isinstance(one, ast.Name))


def test_no_name_of_a_package_is_that_of_its_submodule() -> None:
    assert not set(thunderagent.__all__) & {name.partition(".")[0] for name in MODULES}
    for name, path in MODULES.items():
        if path.name == "__init__.py" and name != "__init__":
            inside = {one.removeprefix(f"{name}.") for one in MODULES if one.startswith(f"{name}.")}
            assert not inside & set(bound(tree(name))), name


PLAIN: Final = {"bool", "float", "int", "str", "None"}


def test_no_constructor_takes_more_than_eight_collaborators() -> None:
    """Plain values are none: they come from the settings."""
    for name in MODULES:
        for node in ast.walk(tree(name)):
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                taken = [*node.args.posonlyargs, *node.args.args[1:], *node.args.kwonlyargs]
                plain = [
                    one
                    for one in taken
                    if one.annotation and set(re.findall(r"\w+", ast.unparse(one.annotation))) <= PLAIN
                ]
                assert len(taken) - len(plain) <= 8, f"{name}:{node.lineno}"


@pytest.mark.slow
def test_expressions_of_dynamodb_are_written_in_one_file() -> None:
    for name in MODULES:
        if name == "stores.dynamo.expressions":
            continue
        texts = [
            node.value for node in ast.walk(tree(name)) if isinstance(node, ast.Constant) and node.value is not None
        ]
        names = [node.arg for node in ast.walk(tree(name)) if isinstance(node, ast.keyword)]
        for word in ("UpdateExpression", "ConditionExpression"):
            assert not [text for text in [*texts, *names] if isinstance(text, str) and text.strip() == word], name


MAY: Final[dict[str, str]] = {
    "boto3 botocore": "stores queue.doorbell.sqs telemetry.cloudwatch ops.doctor websocket_api",
    "websockets": "streams websocket_api testing",
    "loguru logging": "telemetry.logs",
    "typer": "cli",
    "rich": "cli",
    "opentelemetry": "telemetry.traces",
}
"""Rooms and modules that may import a library, with everything inside them."""


@pytest.mark.slow
def test_a_library_is_imported_only_where_it_may_be() -> None:
    for libraries, places in MAY.items():
        for name in MODULES:
            found = {line for line, dotted in imported(tree(name)) if dotted.partition(".")[0] in libraries.split()}
            assert not found or any(f"{name}.".startswith(f"{place}.") for place in places.split()), (name, libraries)


@pytest.mark.slow
def test_opentelemetry_is_not_imported_before_it_is_wanted() -> None:
    for name in MODULES:
        found = {line for line, dotted in imported(tree(name)) if dotted.partition(".")[0] == "opentelemetry"}
        at_the_top = {node.lineno for node in tree(name).body}
        assert not found & at_the_top, name


SLEEPERS: Final[dict[str, tuple[int, str]]] = {
    "queue.stream_commands": (1, "the caller of a command waits for a stream; no agent does"),
    "queue.pause_commands": (1, "the caller of a command waits for agents; no agent does"),
    "stores.sqlite.engine": (
        2,
        "a file that is opened by many processes at once is locked for an instant, and while another writes; bounded",
    ),
    "model.outlet": (1, "a process at its end waits for a reader of its last lines; bounded"),
}
"""Modules of the engine that may call `time.sleep`: how often, and why that delays nobody's stop."""


def calls_of_sleep(parsed: ast.AST) -> list[int]:
    """Lines that call `time.sleep`; as the default of a parameter that a caller may replace it is no call."""
    return [
        node.lineno
        for node in ast.walk(parsed)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "time.sleep"
    ] + [
        node.lineno
        for node in ast.walk(parsed)
        if isinstance(node, ast.ImportFrom) and node.module == "time" and "sleep" in {one.name for one in node.names}
    ]


@pytest.mark.slow
def test_the_engine_never_sleeps_in_a_way_that_nothing_can_wake() -> None:
    for name in (name for name in MODULES if FLOORS.get(room(name), 0) < FLOORS["client"] or room(name) == "agent"):
        allowed, _ = SLEEPERS.get(name, (0, ""))
        assert len(calls_of_sleep(tree(name))) <= allowed, name


def test_a_call_of_sleep_is_found() -> None:
    assert calls_of_sleep(ast.parse("import time\ndef f(sleep=time.sleep):\n    time.sleep(1)")) == [3]
    assert calls_of_sleep(ast.parse("from time import sleep")) == [1]


AWAKE: Final[dict[str, str]] = {
    "model.clock": "where the system has no other clock",
    "stores.sqlite.engine": "waits for the lock of a file, which is not free sooner when the machine has slept",
    "stores.sqlite.link": "how long a fork waits for threads that are inside",
    "stores.dynamo.table": "waits for a table that is being made",
    "stores.large_texts": "how long one look at texts may take",
    "model.outlet": "waits for lines that are to be written",
    "agent.executors.child_end": "waits for processes that are to end",
    "client": "a caller waits for a task",
    "queue.stream_commands": "a caller waits for a stream",
    "queue.pause_commands": "a caller waits for agents",
    "cli.streams": "a command waits",
    "cli.top": "the pace of a picture",
    "agent.health.probes": "how long a request may stay open",
    "ops.local_engine": "waits for a process",
    "testing.fast_loop": "time in tests",
    "testing.time_travel": "time in tests",
    "testing.helpers": "waits in tests",
}
"""Modules that may count on `time.monotonic`, which stands still while the machine sleeps: no lease hangs on it."""


@pytest.mark.slow
def test_what_counts_leases_and_sightings_goes_on_while_the_machine_sleeps() -> None:
    for name in MODULES:
        found = [
            node.lineno
            for node in ast.walk(tree(name))
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("time.monotonic", "time.monotonic_ns")
        ]
        assert name in AWAKE or not found, (
            f"{name}:{found} stands still in suspend: use since_boot, or say why a wait may"
        )
        assert name not in AWAKE or found, f"take {name} out of the list"


def test_no_module_is_too_long_to_be_read_at_once() -> None:
    for name in MODULES:
        longest, _ = LONGER.get(name, (LONGEST, ""))
        lines = len(MODULES[name].read_text(encoding="utf-8").splitlines())
        assert lines <= longest, f"{name} has {lines} lines: split it where a second idea begins"


def test_the_list_of_long_modules_is_not_longer_than_it_must_be() -> None:
    lengths = {name: len(MODULES[name].read_text(encoding="utf-8").splitlines()) for name in LONGER}
    assert {name: lines for name, lines in lengths.items() if lines <= LONGEST} == {}
