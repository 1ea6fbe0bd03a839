"""The client for browsers in a real one: against local gateways that are lost, whose tokens expire, that rotate."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.websocket_api.client.browsers import Browser, Page, browser, gateways, issuer_of
from thunderagent.model.conditions import Is, Write
from thunderagent.stores.sqlite.engine import MEMORY, SqliteEngine
from thunderagent.testing import FakeClock, GlobalTableSim
from thunderagent.websocket_api.client.options import ClientOptions
from thunderagent.websocket_api.client.replica import Replica
from thunderagent.websocket_api.gateway.events import Limits
from thunderagent.websocket_api.gateway.gateway import Gateway
from thunderagent.websocket_api.protocol import Joiner, frames, merge_patch
from thunderagent.websocket_api.push import Pusher
from thunderagent.websocket_api.records import state_id

pytestmark = pytest.mark.processes
LONG_MS = 20_000
REGIONS = ("eu-central-1", "eu-west-1")

START = """
async ([urls, http, options, tokens]) => {
    const { Client } = await import("/client.js");
    globalThis.attempts = [];
    globalThis.pushes = [];
    globalThis.made = async (expires) =>
        (await (await fetch(`${http}token?user=ada&expires_s=${expires}`)).json()).token;
    const token = async (attempt) => {
        attempts.push({ authFailed: attempt.authFailed, number: attempt.number });
        return tokens[attempt.authFailed ? "fresh" : attempts.length === 1 ? "first" : "later"] ?? made(3600);
    };
    class Half extends WebSocket {
        send(text) {
            if (!globalThis.isMute) super.send(text);
        }
    }
    globalThis.client = new Client(urls, token, {
        backoffBaseS: 0.2, backoffCapS: 1, ...options, WebSocket: Half, onPush: (message) => pushes.push(message),
    });
    await client.ready(15);
}
"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """One browser for this file; each test has a context of its own."""
    with browser() as opened:
        yield opened


@pytest.fixture
def page(chromium: Browser) -> Iterator[Page]:
    """A page whose errors fail the test."""
    context = chromium.new_context(viewport={"width": 900, "height": 600})
    context.set_default_timeout(LONG_MS)
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    context.close()
    assert errors == []


@pytest.fixture
def regions() -> Iterator[list[Gateway]]:
    """Two regions over one state."""
    with gateways(REGIONS) as opened:
        yield opened


@pytest.fixture(scope="module")
def still() -> Iterator[list[Gateway]]:
    """The same for tests that change nothing there."""
    with gateways(REGIONS) as opened:
        yield opened


def start(page: Page, regions: list[Gateway], token_from: int = 0, **options: Any) -> None:
    """A page with a client that is ready."""
    tokens = options.pop("tokens", {})
    page.goto(regions[0].http_url + "client.js")
    page.evaluate(START, [[one.url for one in regions], regions[token_from].http_url, options, tokens])


def ask(page: Page, expression: str) -> Any:
    """What an expression gives, which may be a promise; bounded."""
    late = f"new Promise((_, no) => setTimeout(() => no(new Error('not within {LONG_MS} ms')), {LONG_MS}))"
    return page.evaluate(f"Promise.race([{expression}, {late}])")


def story(page: Page) -> list[str]:
    """The events of the connection."""
    return list(ask(page, "client.story.map((event) => event.type)"))


def test_what_is_set_while_the_server_is_lost_is_saved_by_the_other_region(page: Page, regions: list[Gateway]) -> None:
    start(page, regions, token_from=1)
    assert ask(page, "client.set({ cart: { apples: 1 } })") == 1
    regions[0].cut()
    page.wait_for_function("!client.isConnected || client.region === 'eu-west-1'")
    assert ask(page, "client.set({ cart: { pears: 2 } })") == 2
    assert ask(page, "client.get()") == {"cart": {"apples": 1, "pears": 2}}
    assert ask(page, "client.region") == "eu-west-1"
    regions[0].mend()
    assert "connected" in story(page)[2:]
    assert ask(page, "client.close()") == {"ended": "asked", "detail": "", "unacknowledged": 0}


def test_what_a_lost_region_did_not_replicate_is_sent_again_to_the_one_that_takes_over(page: Page) -> None:
    clock = FakeClock()
    with (
        GlobalTableSim(REGIONS, lag_s=600.0, clock=clock) as table,
        gateways(REGIONS, states=[table.engine(name) for name in REGIONS]) as regions,
    ):
        start(page, regions, token_from=1)
        assert ask(page, "client.set({ a: 1 })") == 1
        clock.advance(601.0)
        table.deliver()
        assert ask(page, "client.set({ b: 2 })") == 2  # this one does not come over
        regions[0].cut()
        page.wait_for_function("client.region === 'eu-west-1' && client.unacknowledged.length === 0")
        assert ask(page, "client.get()") == {"a": 1, "b": 2}
        again = page.evaluate("client.story.filter((event) => event.type === 'resubmitted')")
        assert [(event["changes"], event["isCertain"]) for event in again] == [(1, True)]


def test_a_server_whose_table_was_set_back_gets_its_changes_again(page: Page) -> None:
    states = SqliteEngine(MEMORY)
    with gateways(REGIONS[:1], states=[states]) as [gateway]:
        start(page, [gateway])
        assert [ask(page, "client.set({ a: 1 })"), ask(page, "client.set({ b: 2 })")] == [1, 2]
        [answer] = states.apply(
            [Write(verb="set back", task_id=state_id("ada"), delete=True, require=(Is("fence", 2),))]
        )
        assert answer.won
        gateway.rotate()
        page.wait_for_function("client.story.some((event) => event.type === 'resubmitted')")
        assert ask(page, "client.flush(10).then(() => client.get())") == {"a": 1, "b": 2}
    states.close()


def test_an_expired_token_leads_to_a_fresh_one(page: Page, regions: list[Gateway]) -> None:
    start(page, regions[:1], tokens={"later": issuer_of(regions[0]).token("ada", expires_s=-60.0)})
    ask(page, "client.set({ a: 1 })")
    regions[0].rotate()  # the server ends the connection; the token that the page has is over meanwhile
    page.wait_for_function("attempts.length === 3 && client.isConnected")
    assert page.evaluate("attempts.map((one) => one.authFailed)") == [False, False, True]
    assert ask(page, "client.set({ b: 2 })") == 2


def test_a_connection_is_replaced_before_its_limit_without_loss_and_without_a_gap(page: Page) -> None:
    with gateways(REGIONS[:1], Limits(rotate_after_s=4.0)) as [gateway]:
        pusher = Pusher(gateway.post, lambda: gateway._connections)
        try:
            start(page, [gateway], rotateAfterS=1.0)
            sent, until = 0, time.monotonic() + 60.0
            while ask(page, "client.story.filter((event) => event.isRotated).length") < 4:
                assert time.monotonic() < until
                assert pusher.push("ada", sent) >= 1
                sent += 1
                assert ask(page, f"client.set({{ sent: {sent} }})") == sent
            page.wait_for_function(f"pushes.length >= {sent}")
            assert page.evaluate("pushes") == list(range(sent))
            assert set(story(page)) == {"connected"}
            ask(page, "client.close()")
        finally:
            pusher.close()


def test_a_connection_that_the_server_ends_at_its_limit_is_opened_again(page: Page) -> None:
    with gateways(REGIONS[:1], Limits(rotate_after_s=1.0)) as [gateway]:
        start(page, [gateway])
        ask(page, "client.set({ a: 1 })")
        page.wait_for_function("client.story.filter((event) => event.type === 'connected').length >= 3")
        assert ask(page, "client.set({ b: 2 })") == 2
        assert ask(page, "client.state") == {"a": 1, "b": 2}


def test_a_half_open_connection_is_left_after_two_missed_pongs(page: Page, regions: list[Gateway]) -> None:
    start(page, regions[:1], heartbeatS=0.4)
    page.wait_for_function("client.latencyS !== null")
    page.evaluate("globalThis.isMute = true")
    page.wait_for_function("!client.isConnected")
    page.evaluate("globalThis.isMute = false")
    assert ask(page, "client.set({ a: 1 })") == 1
    reasons = ask(page, "client.story.map((event) => event.reason ?? '')")
    assert any("2 pings were not answered" in reason for reason in reasons)


def test_limits_and_refusals_are_told_and_the_end_is_final(page: Page, regions: list[Gateway]) -> None:
    start(page, regions[:1], maxUnacknowledged=2)
    told = ask(
        page,
        """(async () => {
        const errors = [];
        const note = (error) => errors.push(`${error.name}: ${error.message}`);
        await client.set({ a: "x".repeat(140000) }).catch(note);
        await client.set([1]).catch(note);
        await client.set({ a: "y".repeat(125000) }).catch(note);
        client.set({ a: 1 }); client.set({ a: 2 });
        await client.set({ a: 3 }).catch(note);
        await client.flush(5);
        const waiting = client.set({ late: true });
        globalThis.isMute = true;
        client.reconnect();
        const reason = await client.close();
        await waiting.catch(note);
        await client.set({}).catch(note);
        await client.get().catch(note);
        return { errors, reason, state: client.state };
    })()""",
    )
    assert told["state"]["a"] == 2
    assert told["reason"]["ended"] == "asked"
    kinds = [error.partition(":")[0] for error in told["errors"]]
    assert kinds[:4] == ["LimitReached", "TypeError", "ChangeRefused", "LimitReached"]
    assert kinds[4:] in (["ClientClosed"] * 3, ["ClientClosed"] * 2)


@pytest.mark.parametrize("token", ["two words", "", None])
def test_a_token_that_is_none_ends_the_client_with_a_reason(page: Page, still: list[Gateway], token: Any) -> None:
    page.goto(still[0].http_url + "client.js")
    reason = page.evaluate(
        """async ([url, token]) => {
            const { Client } = await import("/client.js");
            return new Client(url, () => token).waitClosed();
        }""",
        [still[0].url, token],
    )
    assert reason["ended"] == "configuration"
    assert "token" in reason["detail"]


def test_a_change_that_is_too_big_for_somebody_on_the_way_is_refused(page: Page) -> None:
    with gateways(REGIONS[:1], Limits(message_bytes=4096, frame_bytes=4096)) as [gateway]:
        start(page, [gateway])
        told = ask(page, "client.set({ big: 'x'.repeat(9000) }).catch((error) => `${error.name}: ${error.message}`)")
        assert told.startswith("ChangeRefused: too_large")
        assert ask(page, "client.set({ small: 1 })") == 1
        assert page.evaluate("client.state") == {"small": 1}


def test_a_token_of_another_user_ends_the_client(page: Page, regions: list[Gateway]) -> None:
    start(page, regions[:1], tokens={"later": issuer_of(regions[0]).token("bob")})
    ask(page, "client.set({ secret: 'of ada' })")
    regions[0].rotate()
    reason = ask(page, "client.waitClosed()")
    assert reason["ended"] == "configuration"
    assert "another user" in reason["detail"]


def test_the_demo_page_keeps_its_state_over_a_fail_over(page: Page, regions: list[Gateway]) -> None:
    page.goto(regions[0].http_url)
    page.wait_for_function("globalThis.client?.isConnected")
    page.fill("input[name=name]", "Ada")
    page.select_option("select[name=theme]", "dark")
    page.click("#add")
    page.wait_for_function("client.version >= 3 && client.unacknowledged.length === 0")
    page.click("article:nth-of-type(1) [data-verb=cut]")
    page.fill("input[name=note]", "written while the region was lost")
    page.click("#add")
    page.wait_for_function("client.region === 'eu-west-1' && client.unacknowledged.length === 0")
    wanted = {"name": "Ada", "theme": "dark", "counter": 2, "note": "written while the region was lost"}
    assert ask(page, "client.get()") == wanted
    assert page.locator("#connection").inner_text() == "connected to eu-west-1"
    assert page.locator("article.here b").inner_text() == "eu-west-1"
    assert page.locator("article:nth-of-type(2) [data-verb=cut]").is_disabled()  # or nobody could mend the first
    assert page.locator("output[name=counter]").inner_text() == "2"
    lines = page.locator("#story li").all_inner_texts()
    assert any("lost" in line for line in lines)
    assert "connected to eu-west-1" in " ".join(lines)
    regions[0].mend()
    page.reload()
    page.wait_for_function("globalThis.client?.version >= 4")
    assert page.input_value("input[name=name]") == "Ada"
    assert page.input_value("input[name=note]") == "written while the region was lost"


def test_two_tabs_of_the_demo_hear_of_each_other_and_lose_nothing(page: Page, regions: list[Gateway]) -> None:
    other = page.context.new_page()
    for tab in (page, other):
        tab.goto(regions[0].http_url)
        tab.wait_for_function("globalThis.client?.isConnected")
    other.focus("input[name=name]")
    page.fill("input[name=name]", "Ada")
    other.wait_for_function("document.querySelector('input[name=name]').value === 'Ada'")  # though it has the focus
    other.locator("input[name=name]").press_sequentially(" Lovelace")
    page.wait_for_function("document.querySelector('input[name=name]').value === 'Ada Lovelace'")
    for tab in (page, other):
        tab.evaluate("for (let number = 0; number < 5; number += 1) document.querySelector('#add').click()")
    for tab in (page, other):
        tab.wait_for_function("document.querySelector('output[name=counter]').textContent === '10'")
    assert ask(page, "client.get()") == ask(other, "client.state") == {"name": "Ada Lovelace", "counter": 10}


@pytest.mark.parametrize("width", [320, 900])
def test_the_demo_page_fits_its_window(page: Page, still: list[Gateway], width: int) -> None:
    page.set_viewport_size({"width": width, "height": 600})
    page.goto(still[0].http_url)
    page.wait_for_function("globalThis.client?.isConnected")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


VALUES = (None, 0, 1.5, "ü\U0001f600", True, [1, {"a": None}], {"b": {"c": 1}}, {"__proto__": {"x": 1}})


def value(rng: random.Random, depth: int = 0) -> Any:
    """Some JSON object."""
    names = rng.sample(["a", "b", "c", "__proto__", "constructor"], rng.randint(0, 3))
    return {name: rng.choice(VALUES) if depth or rng.random() < 0.6 else value(rng, depth + 1) for name in names}


def test_the_twins_merge_and_cut_alike(page: Page, still: list[Gateway]) -> None:
    rng = random.Random(7)
    pairs = [(value(rng), value(rng)) for _ in range(300)]
    texts = [
        json.dumps({"text": "".join(rng.choices('aü\U0001f600"\\', k=n))}, ensure_ascii=False) for n in (9, 40_000)
    ]
    page.goto(still[0].http_url + "client.js")
    found = page.evaluate(
        """async ([pairs, texts]) => {
            const { Joiner, frames, mergePatch } = await import("/client.js");
            const joined = (text) => {
                const joiner = new Joiner();
                const found = frames(text, "a1").map((one) => joiner.add(JSON.parse(one))).at(-1);
                return found;
            };
            return {
                merged: JSON.parse(pairs).map(([target, patch]) => JSON.stringify(mergePatch(target, patch))),
                frames: texts.map((text) => frames(text, "a1")),
                joined: joined(texts[1]),
                polluted: {}.x ?? null,
            };
        }""",
        [json.dumps(pairs), texts],
    )
    assert [json.loads(text) for text in found["merged"]] == [merge_patch(target, patch) for target, patch in pairs]
    assert found["polluted"] is None
    assert found["frames"][0] == [texts[0]]
    joiner = Joiner()
    assert [joiner.add(json.loads(frame)) for frame in found["frames"][1]][-1] == texts[1]
    assert max(len(frame.encode()) for frame in found["frames"][1]) <= 32_000
    assert found["joined"] == texts[1]
    ours = [json.loads(frame) | {"type": "chunk"} for frame in frames(texts[1], "b2")]
    joined = page.evaluate(
        """async (chunks) => {
            const { Joiner } = await import("/client.js");
            const joiner = new Joiner();
            return chunks.map((chunk) => joiner.add(chunk)).at(-1);
        }""",
        ours,
    )
    assert joined == texts[1]


def test_the_twins_see_the_same_state_whatever_servers_say(page: Page, still: list[Gateway]) -> None:
    rng = random.Random(11)
    runs = [[step(rng, number) for number in range(60)] for _ in range(12)]
    page.goto(still[0].http_url + "client.js")
    theirs = page.evaluate(
        """async (runs) => {
            const { DEFAULTS, Replica } = await import("/client.js");
            return runs.map((steps) => {
                const failed = [];
                const options = { ...DEFAULTS, keepAcknowledged: 6, keepAcknowledgedBytes: 60 };
                const one = new Replica(options, (change) => failed.push(change.id));
                return steps.map(([verb, ...given]) => {
                    if (verb === "saved") given[0] = one.tail[0]?.id ?? "none";
                    if (["saved", "changed"].includes(verb) && given[1] === 0) given[1] = one.version + 1;
                    if (verb === "sent") given[0] = one.tail[0]?.id ?? "none";
                    let answer;
                    if (verb === "update") {
                        const add = (state) => {
                            if (state.c === null || state.c % 4 === 3) throw new RangeError("no more");
                            return { c: (typeof state.c === "number" ? state.c : 0) + 1 };
                        };
                        try {
                            one.add(given[0], add);
                        } catch (error) {
                            answer = error.message;
                        }
                    } else answer = one[verb](...given);
                    const told = verb === "add" ? null : answer ?? null;
                    const about = ({ id, isCheck, problem, unanswered }) => [id, isCheck, problem !== null, unanswered];
                    const head = one.tail[0];
                    return [told, one.state, one.version, one.region, one.tail.map(about), one.log.map(({ id }) => id),
                        one.unacknowledged.length, one.isFull, failed.splice(0),
                        head === undefined ? null : [one.versionFor(head), one.isInDoubt(head)]];
                });
            });
        }""",
        runs,
    )
    for steps, told in zip(runs, theirs, strict=True):
        assert [list(one) for one in ours(steps)] == told


def step(rng: random.Random, number: int) -> list[Any]:
    """Something that happens to a replica."""
    patch = {rng.choice("abc"): rng.choice([None, number, {"x": number}])}
    version, region = rng.randint(0, 12), rng.choice(REGIONS)
    return rng.choice(
        [
            ["add", f"c{number}", patch],
            ["add", f"c{number}", patch, rng.choice([None, version])],
            ["update", f"c{number}"],
            ["update", f"c{number}"],
            ["sent", "", rng.choice([None, version])],
            [
                "changed",
                f"c{rng.randint(0, 80)}",
                rng.choice([0, 0, version]),
                rng.choice([patch, patch, None]),
                region,
            ],
            ["saved", "", rng.choice([0, 0, 0, version]), region, number * 10.0],
            ["observed", patch, version, region, number * 10.0, rng.random() < 0.5],
            ["conflict", rng.randint(0, 12), patch, version, region, number * 10.0],
            ["drop", f"c{rng.randint(0, 60)}"],
            ["heard", number * 10.0],
        ]
    )


def ours(steps: list[list[Any]]) -> Iterator[tuple[Any, ...]]:
    """The same steps in Python."""
    failed: list[str] = []
    options = ClientOptions(keep_acknowledged=6, keep_acknowledged_bytes=60)
    one = Replica(options, lambda change, error: failed.append(change.id))

    def add(state: dict[str, Any]) -> dict[str, Any]:
        value = state.get("c", 0)
        if value is None or (isinstance(value, int) and value % 4 == 3):
            raise ValueError("no more")
        return {"c": (value if isinstance(value, int) else 0) + 1}

    for verb, *given in steps:
        told: Any = None
        match verb:
            case "add":
                one.add(*given[:2], expected=given[2] if len(given) > 2 else None)
            case "update":
                try:
                    one.add(given[0], add)
                except ValueError as error:
                    told = str(error)
            case "sent":
                one.sent(one.head.id if one.head else "none", given[1])
            case "changed":
                told = one.changed(given[0], given[1] or one.version + 1, *given[2:])
            case "saved":
                version = given[1] or one.version + 1
                told = one.saved(one.head.id if one.head else "none", version, *given[2:])
            case "observed":
                told = list(one.observed(*given[:4], is_behind=given[4]))
            case "conflict":
                told = list(one.conflict(*given))
            case "drop":
                one.drop(*given)
            case "heard":
                one.heard(*given)
        tail = [[change.id, change.is_check, change.problem is not None, change.unanswered] for change in one._tail]
        log = [change.id for change in one._log]
        about = [one.version_for(one.head), one.is_in_doubt(one.head)] if one.head else None
        yield (
            told,
            one.state,
            one.version,
            one.region,
            tail,
            log,
            len(one.unacknowledged),
            one.is_full,
            [*failed],
            about,
        )
        failed.clear()
