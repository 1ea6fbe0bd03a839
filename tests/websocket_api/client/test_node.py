"""The client for browsers in node: on a clock that moves by hand, and beside the client in Python."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.websocket_api.client.support import PROMPT, connected, governor, run, until
from thunderagent.stores.sqlite.engine import MEMORY, SqliteEngine
from thunderagent.websocket_api.client import Client, Disconnected, Throttled
from thunderagent.websocket_api.gateway.events import Limits
from thunderagent.websocket_api.gateway.gateway import Gateway
from thunderagent.websocket_api.gateway.issuer import Issuer
from thunderagent.websocket_api.gateway.pages import BROWSER

NODE: Final = shutil.which("node")
LONG_S: Final = 60.0

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(NODE is None, reason="no node: on Debian apt-get install nodejs"),
]


@pytest.fixture
def module(tmp_path: Path) -> Iterator[str]:
    """The client under a name by which node knows a module."""
    file = tmp_path / "client.mjs"
    file.write_text((BROWSER / "client.js").read_text(encoding="utf-8"), encoding="utf-8")
    yield file.as_uri()


def node(script: str, *arguments: Any) -> Any:
    """What a script prints as JSON; it has its arguments in `given`."""
    assert NODE is not None
    told = subprocess.run(
        [NODE, "--input-type=module", "-", json.dumps(arguments)],
        input=f"const given = JSON.parse(process.argv[2]);\n{script}",
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    return json.loads(told.stdout)


TIME: Final = """
// A clock that moves by hand, and an API in memory; `lost(action, count)` says whether an answer gets lost.
let now = 0, number = 0;
const timers = new Map();
const add = (call, ms = 0, every = null) => (timers.set(++number, { call, at: now + ms, every }), number);
globalThis.performance.now = () => now;
globalThis.setTimeout = (call, ms) => add(call, ms);
globalThis.setInterval = (call, ms) => add(call, ms, ms);
globalThis.clearTimeout = globalThis.clearInterval = (id) => timers.delete(id);
const settle = () => new Promise((resolve) => setImmediate(resolve));
async function pass(seconds) {
    for (const until = now + seconds * 1000; ; ) {
        for (let turn = 0; turn < 5; turn += 1) await settle();
        const [next] = [...timers].filter(([, one]) => one.at <= until).sort(([, one], [, other]) => one.at - other.at);
        if (next === undefined) return void (now = until);
        const [id, timer] = next;
        now = timer.at;
        if (timer.every === null) timers.delete(id);
        else timer.at += timer.every;
        timer.call();
    }
}
const api = { state: {}, version: 0, changes: {}, sockets: [], counts: {}, lost: () => false, opened: 0 };
function answer({ action, id, version, patch, change }) {
    const { state } = api;
    if (action === "ping") return { type: "pong", id };
    if (action === "getState") return { type: "state", id, state, version: api.version, region: "a" };
    if (change in api.changes) return { type: "saved", id, version: api.changes[change], region: "a" };
    if (version !== api.version) return { type: "conflict", id, state, version: api.version, region: "a" };
    return { type: "saved", id, version: theirs(patch, change), region: "a" };
}
function theirs(patch, change) {
    api.state = mergePatch(api.state, patch);
    return (api.changes[change] = api.version += 1);
}
class FakeSocket {
    constructor() {
        api.opened += 1;
        api.sockets.push(this);
        queueMicrotask(() => this.onopen());
    }
    send(text) {
        const message = JSON.parse(text);
        const count = (api.counts[message.action] = (api.counts[message.action] ?? 0) + 1);
        const reply = answer(message);
        if (!api.lost(message.action, count)) queueMicrotask(() => this.tell(reply));
    }
    tell(message) {
        this.onmessage?.({ data: JSON.stringify(message) });
    }
    close() {}
}
const { Client, mergePatch } = await import(given[0]);
const client = new Client("ws://api.test", "good", { WebSocket: FakeSocket, random: () => 0.5 });
await pass(1);
const tell = (value) => process.stdout.write(JSON.stringify(value), () => process.exit(0));
const count = (state) => ({ count: (state.count ?? 0) + 1 });
const outcome = (promise) => promise.then((value) => value, (error) => `${error.name}: ${error.message}`);
"""


def test_pongs_that_are_lost_far_apart_do_not_end_a_healthy_connection(module: str) -> None:
    told = node(
        TIME
        + """
        api.lost = (action, count) => action === "ping" && [4, 100, 101 + 40].includes(count);
        await pass(150 * 30);
        const healthy = { opened: api.opened, pings: api.counts.ping, isConnected: client.isConnected };
        api.lost = (action) => action === "ping";
        await pass(60.5);
        tell({ ...healthy, after: client.story.at(-1).reason ?? client.story.at(-2).reason });
        """,
        module,
    )
    assert (told["opened"], told["isConnected"]) == (1, True)
    assert told["pings"] > 140
    assert "2 pings were not answered" in told["after"]


def test_an_update_is_made_again_upon_what_others_have_made_and_a_change_of_others_is_heard(module: str) -> None:
    told = node(
        TIME
        + """
        const seen = [];
        theirs({ count: 5, list: ["theirs"] }, "x"); // and nobody is told
        const saved = client.update((state) => {
            seen.push(JSON.parse(JSON.stringify(state)));
            state.spoilt = true;
            return { ...count(state), list: [...(state.list ?? []), "ours"] };
        });
        const atOnce = client.state;
        await pass(5);
        const version = await saved;
        const asked = api.counts.getState;
        theirs({ count: 9 }, "y");
        api.sockets[0].tell({ type: "changed", version: 3, change: "y", region: "a", patch: { count: 9 } });
        const heard = [client.state.count, api.counts.getState - asked];
        theirs({ long: 1 }, "z");
        api.sockets[0].tell({ type: "changed", version: 4, change: "z", region: "a" });
        await pass(1);
        const off = outcome(client.update((state) => { throw new RangeError(`full at ${state.count}`); }));
        const none = outcome(client.update(() => undefined));
        const noFunction = outcome(client.update({ a: 1 }));
        const stale = outcome(client.set({ a: 1 }, { version: 3 }));
        await pass(5);
        const fresh = outcome(client.set({ a: 1 }, { version: client.version }));
        await pass(5);
        tell({ seen, atOnce, version, heard, asked: api.counts.getState - asked, state: client.state, same: api.state,
            outcomes: [await off, await none, await noFunction, await stale, await fresh] });
        """,
        module,
    )
    assert told["seen"] == [{}, {"count": 5, "list": ["theirs"]}]
    assert told["atOnce"] == {"count": 1, "list": ["ours"]}
    assert (told["version"], told["heard"], told["asked"]) == (2, [9, 0], 1)
    assert told["state"] == told["same"] == {"count": 9, "list": ["theirs", "ours"], "long": 1, "a": 1}
    off, none, no_function, stale, fresh = told["outcomes"]
    assert off == "RangeError: full at 9"
    assert none == "TypeError: a JSON merge patch of a state is an object"
    assert no_function.startswith("TypeError: update takes a function")
    assert stale.startswith("VersionConflict: conflict: the state has version 4 and not 3")
    assert fresh == 5


def test_an_update_whose_answer_was_lost_is_made_once_or_not_at_all(module: str) -> None:
    told = node(
        TIME
        + """
        let others = 0;
        const lose = (more) => {
            api.lost = (action) => {
                if (action !== "setState") return false;
                for (let left = more; left > 0; left -= 1) theirs({ other: (others += 1) }, `x${others}`);
                if (more >= 50) api.changes = {}; // the last fifty are known
                api.lost = () => false;
                return true;
            };
        };
        const once = (state) => {
            if (state.list) throw new RangeError("it is there");
            return { list: ["ours"] };
        };
        lose(1);
        const first = outcome(client.update(once));
        await pass(30);
        await client.get();
        lose(60);
        const second = outcome(client.update(count));
        await pass(1);
        api.sockets[0].tell({ type: "changed", version: api.version, change: "x", region: "a" });
        await pass(30);
        const right = answer;
        const refused = ({ id }) => ({ type: "error", id, error: "throttled", retry_after_s: 1 });
        answer = (message) => {
            if (message.action !== "setState") return right(message);
            for (let left = 60; left > 0; left -= 1) theirs({ other: (others += 1) }, `x${others}`);
            answer = right;
            return refused(message);
        };
        const third = outcome(client.update(count));
        await pass(30);
        const told = { outcomes: [await first, await second, await third], state: client.state, same: api.state };
        answer = (message) => (message.action === "chunk" ? refused(message) : right(message));
        client.set({ long: "x".repeat(40000) });
        await pass(5);
        tell({ ...told, chunks: api.counts.chunk });
        """,
        module,
    )
    assert told["outcomes"][0] == 1
    assert told["outcomes"][1].startswith("ChangeRefused: in doubt: whether the change was made is not known")
    assert told["outcomes"][2] == 124  # what was refused as too much was sent is not in doubt
    assert told["state"] == told["same"] == {"list": ["ours"], "other": 121, "count": 2}
    assert told["chunks"] > 2  # an error of a chunk answers its request


TABS: Final = """
const { Client } = await import(given[0]);
const [, url, token, clients, updates, total] = given;
const tabs = Array.from({ length: clients }, () => new Client(url, token, { backoffBaseS: 0.2 }));
await Promise.all(tabs.map((one) => one.ready(20)));
console.log("ready");
const versions = await Promise.all(
    tabs.flatMap((one, tab) =>
        Array.from({ length: updates }, (_, number) =>
            one.update(({ count, all }) => ({ count: (count ?? 0) + 1, all: [...(all ?? []), `js${tab}-${number}`] })),
        ),
    ),
);
while (!tabs.every((one) => one.version === total)) await new Promise((resolve) => setTimeout(resolve, 20));
const stories = tabs.map((one) => one.story.map(({ type }) => type));
console.log(JSON.stringify({ versions, states: tabs.map((one) => one.state), stories }));
for (const one of tabs) await one.close();
process.exit(0);
"""


@pytest.mark.parametrize("limits", [Limits(), Limits(user_rate=8, user_burst=24)], ids=["plenty", "scarce"])
def test_clients_of_both_languages_change_computed_values_at_once_and_each_change_counts(
    module: str, limits: Limits
) -> None:
    issuer, tabs, each = Issuer(), 3, 4
    total = 2 * tabs * each
    script = f"const given = JSON.parse(process.argv[2]);\n{TABS}"

    async def count(name: str, client: Client) -> int:
        def add(state: dict[str, Any]) -> dict[str, Any]:
            return {"count": state.get("count", 0) + 1, "all": [*state.get("all", []), name]}

        return await client.update(add)

    async def main() -> None:
        assert NODE is not None
        states, connections = SqliteEngine(MEMORY), SqliteEngine(MEMORY)
        async with Gateway(states, connections, authorizer=issuer.authorizer(), limits=limits) as gateway:
            given = json.dumps([module, gateway.url, issuer.token("ada"), tabs, each, total])
            process = await asyncio.create_subprocess_exec(
                *(NODE, "--experimental-websocket", "--no-warnings", "--input-type=module", "-e", script, "-", given),
                stdout=asyncio.subprocess.PIPE,
            )
            assert process.stdout is not None
            token = lambda attempt: issuer.token("ada")  # noqa: E731
            options: dict[str, Any] = {"token": token, "options": PROMPT}
            try:
                async with (
                    connected(gateway, **options, governor=governor(1)) as one,
                    connected(gateway, **options, governor=governor(2)) as two,
                    connected(gateway, **options, governor=governor(3)) as three,
                ):
                    assert (await process.stdout.readline()).strip() == b"ready"
                    ours = [
                        count(f"py{tab}-{number}", client)
                        for tab, client in enumerate((one, two, three))
                        for number in range(each)
                    ]
                    versions = await asyncio.gather(*ours)
                    told = json.loads(await process.stdout.readline())
                    await until(lambda: all(client.version == total for client in (one, two, three)))
                    state = await one.get()
                    assert [client.state for client in (one, two, three)] == told["states"] == [state] * tabs
                    assert sorted([*versions, *told["versions"]]) == list(range(1, total + 1))
                    assert (state["count"], len(set(state["all"]))) == (total, total)
                    events = [event for client in (one, two, three) for event in client.story]
                    kinds = [*(kind for story in told["stories"] for kind in story), *(type(event) for event in events)]
                    is_scarce = limits != Limits()
                    assert ("throttled" in kinds, Throttled in kinds) == (is_scarce, is_scarce)
                    assert not {"disconnected", Disconnected} & set(kinds)
                await asyncio.wait_for(process.wait(), 10.0)
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        states.close()
        connections.close()

    run(main(), limit_s=LONG_S)
