/**
 * A client of ThunderAgent's WebSocket API for browsers; an ES module without dependencies.
 *
 *     import { Client } from "./client.js";
 *     const client = new Client("wss://api.example.com/live", async ({ authFailed }) => token(authFailed), {
 *         onState: (state, version) => show(state),
 *         onPush: (message) => show(message),
 *         fleet: 30000,
 *     });
 *     await client.set({ theme: "dark" });
 *     await client.update((state) => ({ todo: [...(state.todo ?? []), "milk"] }));
 *
 * It connects by itself and stays connected. It pings every 30 s; two missed pongs end a connection. Delays between
 * attempts have full jitter and begin again at 0 after progress. A connection is replaced before the API ends it.
 * Changes wait while there is no server. Changes that a server of another region has lost are sent again.
 *
 * Its twin in Python is `thunderagent.websocket_api.client`: the same behaviour, and names in the spelling of the language.
 */

export const SUBPROTOCOL = "thunderagent.v1";
export const FRAME_BYTES = 32000;
export const MESSAGE_BYTES = 128 * 1024;
const MOST_CHUNKS = 64;
const MOST_OPEN = 4;
const CHANGES_KEPT = 50;
const FLOOR_S = 0.1;
const CONNECTS_A_SECOND = 500;
const REFUSED_CODES = [1008, 4001, 4003, 4401, 4403];
const FINAL_PROBLEMS = ["bad_request", "too_large", "unknown_route"];
const INTERNAL_TRIES = 5;
const TOO_BIG = 1009;
const TOO_BIG_TRIES = 2;
const LONGEST_PAUSE_S = 30;
const IN_DOUBT =
    `whether the change was made is not known: its answer was lost, and more than ${CHANGES_KEPT} changes of others have ` +
    "come since; look at the state before you make it again";
const PUSHES_KNOWN = 100;
const STORY = 100;

/** Every number, as in `ClientOptions` of the twin. Times are in seconds. */
export const DEFAULTS = Object.freeze({
    heartbeatS: 30,
    missedPongs: 2,
    requestTimeoutS: 10,
    openTimeoutS: 10,
    closeTimeoutS: 2,
    backoffBaseS: 0.5,
    backoffCapS: 60,
    stableAfterS: 30,
    rotateAfterS: 6300,
    rotationRetryS: 30,
    fleet: 1,
    refusals: 20,
    maxUnacknowledged: 100,
    keepAcknowledged: 100,
    keepAcknowledgedBytes: 1 << 20,
    recheckS: 60,
    maxEvents: 256,
});

/** The client has ended; `reason` says why. */
export class ClientClosed extends Error {
    constructor(reason) {
        super(`the client has ended: ${describe(reason)}`);
        this.name = "ClientClosed";
        this.reason = reason;
    }
}

/** No server will take this change. */
export class ChangeRefused extends Error {
    constructor(problem, message) {
        super(`${problem}: ${message || "no reason given"}`);
        this.name = "ChangeRefused";
        this.problem = problem;
    }
}

/** The state has another version than the change was made for. */
export class VersionConflict extends ChangeRefused {
    constructor(expected, version) {
        super("conflict", `the state has version ${version} and not ${expected}: look at it and decide again`);
        this.name = "VersionConflict";
    }
}

/** Too many changes wait for a server, or a message cannot be sent. */
export class LimitReached extends Error {
    constructor(message) {
        super(message);
        this.name = "LimitReached";
    }
}

// Data

const encoder = new TextEncoder();
const bytes = (text) => encoder.encode(text).length;
const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const seconds = () => performance.now() / 1000;

function put(target, name, value) {
    // Or a member "__proto__" would not become a member.
    Object.defineProperty(target, name, { value, writable: true, enumerable: true, configurable: true });
}

/** The target after a JSON merge patch (RFC 7396); neither is changed. */
export function mergePatch(target, patch) {
    if (!isObject(patch)) return patch;
    const merged = {};
    if (isObject(target)) for (const name of Object.keys(target)) put(merged, name, target[name]);
    for (const name of Object.keys(patch)) {
        if (patch[name] === null) delete merged[name];
        else put(merged, name, mergePatch(Object.hasOwn(merged, name) ? merged[name] : undefined, patch[name]));
    }
    return merged;
}

/** Whether both are the same JSON in any order of members. */
function isEqual(one, other) {
    if (one === other) return true;
    if (typeof one !== "object" || typeof other !== "object" || one === null || other === null) return false;
    const names = Object.keys(one);
    return (
        Array.isArray(one) === Array.isArray(other) &&
        names.length === Object.keys(other).length &&
        names.every((name) => Object.hasOwn(other, name) && isEqual(one[name], other[name]))
    );
}

const NO_PATCH = "a JSON merge patch of a state is an object";

/** The patch of a change after a round trip through JSON, and its size. */
function checked(patch) {
    if (!isObject(patch)) throw new TypeError(NO_PATCH);
    const text = JSON.stringify(patch);
    frames(JSON.stringify({ action: "setState", id: "0".repeat(16), version: 2 ** 53, patch, change: "0".repeat(36) }), "0");
    return { patch: JSON.parse(text), size: bytes(text) };
}

/** The change with its patch for this state; the same change if it has that already: it may be on its way. */
function made(change, state) {
    if (change.make === null || (change.base !== null && isEqual(change.base, state))) return change;
    return { ...change, ...checked(change.make(JSON.parse(JSON.stringify(state)))), base: state, problem: null };
}

/** The frames of a message: its text alone, or chunks whose joined data is the text. */
export function frames(text, chunkId) {
    if (bytes(text) > MESSAGE_BYTES) {
        throw new LimitReached(
            `the message has ${bytes(text)} bytes, at most ${MESSAGE_BYTES} can be sent: store the data and send a reference`,
        );
    }
    if (bytes(text) <= FRAME_BYTES) return [text];
    const head = { action: "chunk", id: chunkId, index: MOST_CHUNKS, of: MOST_CHUNKS, data: "" };
    const room = FRAME_BYTES - bytes(JSON.stringify(head));
    const pieces = [];
    for (let start = 0; start < text.length; ) {
        let length = Math.min(room, text.length - start);
        let taken;
        while ((taken = bytes(JSON.stringify(text.slice(start, start + length))) - 2) > room) {
            length = Math.max(1, Math.min(length - 1, Math.floor((length * room) / taken)));
        }
        pieces.push(text.slice(start, start + length));
        start += length;
    }
    return pieces.map((data, index) => JSON.stringify({ ...head, index, of: pieces.length, data }));
}

/** Joins chunks; a message whose chunks do not fit is dropped. */
export class Joiner {
    #open = new Map();

    /** The text that this chunk completes, else null. */
    add({ id, index, of, data }) {
        const isRight =
            typeof id === "string" && typeof data === "string" && Number.isInteger(index) && Number.isInteger(of);
        if (!isRight || index < 0 || index >= of || of > MOST_CHUNKS) return null;
        const known = this.#open.get(id) ?? { of, parts: new Map(), size: 0 };
        this.#open.delete(id);
        if (known.of !== of || (known.parts.has(index) && known.parts.get(index) !== data)) return null;
        if (!known.parts.has(index)) known.size += bytes(data);
        known.parts.set(index, data);
        if (known.size > MESSAGE_BYTES) return null;
        if (known.parts.size === of) return Array.from({ length: of }, (_, place) => known.parts.get(place)).join("");
        this.#open.set(id, known);
        if (this.#open.size > MOST_OPEN) this.#open.delete(this.#open.keys().next().value);
        return null;
    }
}

/** Whether the state includes this change. */
const isShown = ({ isCheck, problem }) => !isCheck && problem === null;

/** The state as a client sees it, and the changes that a server may not have; without a connection. */
export class Replica {
    #failed;
    #isMaking = false;

    /** `failed(change, error)` is called for an update whose function threw for a new state, or returned no patch. */
    constructor(options = DEFAULTS, failed = () => {}) {
        this.options = options;
        this.#failed = failed;
        this.confirmed = {};
        this.version = 0;
        this.region = null;
        this.heardAt = -Infinity; // the last answer of the region
        this.tail = [];
        this.log = [];
    }

    /** The confirmed state with the changes of this client. */
    get state() {
        return this.tail.reduce((state, one) => (isShown(one) ? mergePatch(state, one.patch) : state), this.confirmed);
    }

    /** Changes that no server has, oldest first: not acknowledged, or lost. */
    get unacknowledged() {
        return this.tail.filter((one) => !one.isCheck);
    }

    get isFull() {
        return this.tail.filter((one) => one.version === null).length >= this.options.maxUnacknowledged;
    }

    /** Add a change to the tail: a patch, or a function that returns it for a state. */
    add(id, patch, expected = null) {
        if (this.#isMaking) throw new Error("the function of an update changes the state; it may only compute");
        const make = typeof patch === "function" ? patch : null;
        const blank = { id, patch: {}, size: 0, version: null, region: null, at: 0, isCheck: false, make, base: null };
        const change = { ...blank, problem: null, expected, unanswered: null };
        this.tail.push(make === null ? { ...change, ...checked(patch) } : made(change, this.state));
    }

    /** A server refused this change. */
    drop(id) {
        this.#remove(id);
        this.#makeAgain();
    }

    /** A change is sent with this version. Null: the server answered that it is not made. */
    sent(id, version) {
        const refuted = version === null ? { unanswered: null, isCheck: false } : {};
        this.tail = this.tail.map((one) =>
            one.id === id ? { ...one, unanswered: one.unanswered ?? version, ...refuted } : one,
        );
        if (version === null) this.#makeAgain();
    }

    /** The version to send a change with. */
    versionFor({ expected, problem, unanswered }) {
        if (expected !== null) return expected;
        // With a problem it only asks: the server does not make it upon its present version.
        return problem === null ? this.version : unanswered;
    }

    /** Whether no server can know any more if a change was made, and making it twice would be wrong. */
    isInDoubt({ make, expected, unanswered }) {
        const isPlain = make === null && expected === null;
        return !isPlain && unanswered !== null && this.version - unanswered > CHANGES_KEPT;
    }

    /** The region answered at this second. */
    heard(now) {
        this.heardAt = now;
    }

    /** A server has saved a change as this version. True: the state must be read again. */
    saved(id, version, region, now) {
        this.heard(now);
        const change = this.tail.find((one) => one.id === id);
        if (change === undefined) return false;
        this.#remove(id);
        if (version === this.version + 1) {
            this.confirmed = mergePatch(this.confirmed, change.patch);
            this.version = version;
        }
        const fresh = { isCheck: false, base: null, problem: null, expected: null, unanswered: null };
        this.#keep({ ...change, ...fresh, version, region, at: now });
        this.region = region;
        this.#makeAgain();
        return version > this.version;
    }

    /** Another connection of the user has made a change. True: changes before it are missing, read the state. */
    changed(id, version, patch, region) {
        if (version <= this.version && region === this.region) return false;
        // Sent by this client over a second connection: its answer is on the way.
        if (this.tail.some((one) => one.id === id)) return false;
        if (version !== this.version + 1 || patch === null || region !== this.region) return true;
        this.confirmed = mergePatch(this.confirmed, patch);
        this.version = version;
        this.#makeAgain();
        return false;
    }

    /** A server has sent its state: the number of changes to send again, and whether they are certainly lost. */
    observed(state, version, region, now, isBehind = false) {
        const hasMoved = region !== this.region && this.region !== null;
        // Changes are as old as at the last answer of their region: the way to another may take minutes.
        const lastHeard = this.heardAt;
        this.heard(now);
        if (version < this.version && !isBehind && !hasMoved) return [0, false]; // a later answer came first
        const lost = this.log.filter((one) => one.version > version);
        const doubtful = this.log.filter(
            (one) =>
                hasMoved &&
                one.version <= version &&
                one.region !== region &&
                lastHeard - one.at <= this.options.recheckS,
        );
        this.confirmed = state;
        this.version = version;
        this.region = region;
        const again = [
            ...lost.map((one) => ({ ...one, isCheck: false })),
            ...doubtful.map((one) => ({ ...one, isCheck: true, unanswered: one.version - 1 })),
        ].sort((one, other) => one.version - other.version);
        const ids = new Set(again.map((one) => one.id));
        this.log = this.log.filter((one) => !ids.has(one.id));
        this.tail = [...again, ...this.tail.filter((one) => !ids.has(one.id))];
        this.#makeAgain();
        return lost.length ? [lost.length, true] : [doubtful.length, false];
    }

    /** A server refused a change: its version is not the one that was `sent`. */
    conflict(sent, state, version, region, now) {
        if (version < this.version && version >= sent && region === this.region) return [0, false];
        return this.observed(state, version, region, now, version < sent);
    }

    #remove(id) {
        this.tail = this.tail.filter((one) => one.id !== id);
    }

    /** Make the patch of each update for the state before it. A failing update goes unless a server may have it. */
    #makeAgain() {
        const tail = [];
        const failed = [];
        let state = this.confirmed;
        for (let one of this.tail) {
            this.#isMaking = true;
            try {
                one = made(one, state);
            } catch (error) {
                if (one.unanswered === null) {
                    failed.push([one, error]);
                    continue;
                }
                one = { ...one, problem: error, base: null };
            } finally {
                this.#isMaking = false;
            }
            tail.push(one);
            if (isShown(one)) state = mergePatch(state, one.patch);
        }
        this.tail = tail;
        for (const [one, error] of failed) this.#failed(one, error);
    }

    #keep(change) {
        this.log.push(change);
        let size = this.log.reduce((sum, one) => sum + one.size, 0);
        const { keepAcknowledged, keepAcknowledgedBytes } = this.options;
        while (this.log.length > keepAcknowledged || (size > keepAcknowledgedBytes && this.log.length > 1)) {
            size -= this.log.shift().size;
        }
    }
}

// Waiting

/** Whether the server asks for a pause instead of an answer. */
const isThrottled = (answer) => answer?.type === "error" && answer.error === "throttled";

/** The seconds that an error asks to wait, within bounds. */
const pauseOf = ({ retry_after_s: pauseS }) => (pauseS > 0 ? Math.min(pauseS, LONGEST_PAUSE_S) : 0);

function describe({ ended, detail, unacknowledged }) {
    const lost = unacknowledged ? `; ${unacknowledged} changes were not acknowledged` : "";
    return (detail ? `${ended}: ${detail}` : ended) + lost;
}

/** A promise with its functions. */
function deferred() {
    const one = {};
    one.promise = new Promise((resolve, reject) => Object.assign(one, { resolve, reject }));
    one.promise.catch(() => {}); // taken, or the page would report the error of an answer that nothing awaits
    return one;
}

/** The promise of a function, rejected if it throws. */
function promised(give) {
    try {
        return give();
    } catch (error) {
        return Promise.reject(error);
    }
}

/** The result of a promise, or an error with this text after so many seconds. */
async function within(limitS, promise, what) {
    if (limitS === null || limitS === undefined) return promise;
    let timer;
    const late = new Promise((_, reject) => {
        timer = setTimeout(() => reject(new Error(`${what} (waited ${limitS} s)`)), limitS * 1000);
    });
    try {
        return await Promise.race([promise, late]);
    } finally {
        clearTimeout(timer);
    }
}

/** Report the error of a handler to the page, without effect on the client. */
function report(error) {
    setTimeout(() => {
        throw error;
    });
}

/** Failures of one change. */
function startAfresh(tries) {
    Object.assign(tries, { failures: 0, conflicts: 0, internal: 0, tooBig: 0 });
}

/** A bounded queue of events for the handlers. */
class Subscription {
    #events = [];
    #limit;
    #handle;
    #isBusy = false;
    #dropped = 0;

    constructor(limit, handle) {
        this.#limit = limit;
        this.#handle = handle;
    }

    put(event) {
        const last = this.#events.at(-1);
        if (event.type === "state" && last?.type === "state") this.#events.pop();
        else if (this.#events.length >= this.#limit) this.#makeRoom();
        this.#events.push(event);
        if (!this.#isBusy) this.#run();
    }

    #makeRoom() {
        const place = Math.max(
            0,
            this.#events.findIndex((one) => one.type === "push"),
        );
        this.#dropped += this.#events[place].type === "push";
        this.#events.splice(place, 1);
    }

    async #run() {
        this.#isBusy = true;
        while (this.#events.length) {
            const pushes = this.#dropped;
            this.#dropped = 0;
            try {
                await this.#handle(pushes ? { type: "dropped", at: Date.now(), pushes } : this.#events.shift());
            } catch (error) {
                report(error);
            }
        }
        this.#isBusy = false;
    }
}

/** One socket: requests, answers, and the watch over it. */
class Connection {
    #client;
    #socket;
    #open = new Map();
    #joiner = new Joiner();
    #ticking = null;
    ended = deferred();
    isOver = false;

    constructor(client, socket) {
        this.#client = client;
        this.#socket = socket;
        socket.onmessage = ({ data }) => this.#take(data);
        socket.onclose = ({ code, reason }) => this.#over({ code, detail: reason || `closed with ${code}` });
        socket.onerror = () => {}; // `onclose` follows
    }

    /** The answer to a request; null: the connection ended, or the time is over. */
    async ask(action, members = {}, limitS = this.#client.options.requestTimeoutS) {
        if (this.isOver) return null;
        const id = this.#client.nextId();
        const waiting = deferred();
        this.#open.set(id, waiting);
        try {
            // Chunks have the id of the request, so an error of one of them answers it.
            for (const frame of frames(JSON.stringify({ action, id, ...members }), id)) {
                this.#socket.send(frame);
            }
            return await within(limitS, waiting.promise, "no answer");
        } catch {
            return null;
        } finally {
            this.#open.delete(id);
        }
    }

    /** Ping every `heartbeatS`; `missedPongs` in a row without an answer in half of that end the connection. */
    watch() {
        const { heartbeatS, missedPongs } = this.#client.options;
        const tickS = heartbeatS / 4;
        let sincePing = 0;
        let waited = 0;
        let misses = 0;
        let isOpen = false;
        const ping = async () => {
            sincePing = waited = 0;
            isOpen = true;
            const began = seconds();
            const answer = await this.ask("ping", {}, heartbeatS * (missedPongs + 1));
            if (answer?.type !== "pong" && !isThrottled(answer)) return; // a refusal is a sign of life
            isOpen = false;
            misses = 0;
            this.#client.heard(seconds() - began);
        };
        this.probe = () => isOpen || ping();
        this.#ticking = setInterval(() => {
            // In a page that slept, a late timer counts as one tick: answers that are here come first.
            sincePing += tickS;
            if (isOpen) {
                waited += tickS;
                if (waited < heartbeatS / 2 - tickS / 20) return;
                misses += 1;
                if (misses >= missedPongs) {
                    this.leave({ code: 1006, detail: `${misses} pings were not answered` });
                    return;
                }
                ping();
            } else if (sincePing >= heartbeatS - tickS / 20) ping();
        }, tickS * 1000);
    }

    probe() {}

    /** End it now: a browser would wait a minute for the peer's answer. */
    leave(end) {
        const socket = this.#socket;
        this.#over(end);
        socket.onmessage = socket.onclose = null;
        try {
            socket.close(1000);
        } catch {
            // It is closed already.
        }
    }

    #over(end) {
        if (this.isOver) return;
        this.isOver = true;
        clearInterval(this.#ticking);
        for (const waiting of this.#open.values()) waiting.resolve(null);
        this.#open.clear();
        this.ended.resolve(end);
    }

    #take(data) {
        let message = parse(data);
        if (message?.type === "chunk") message = parse(this.#joiner.add(message));
        if (message === null) return;
        if (isThrottled(message)) this.#client.throttled(Math.max(FLOOR_S, pauseOf(message)));
        if (message.type === "push") this.#client.pushed(message);
        else if (message.type === "changed") this.#client.changed(message);
        else this.#open.get(message.id)?.resolve(message);
    }
}

/** The `sub` that a JWT claims, which only the server can verify. Null: it is no JWT. */
function subject(token) {
    try {
        return JSON.parse(atob(token.split(".")[1].replaceAll("-", "+").replaceAll("_", "/"))).sub ?? null;
    } catch {
        return null;
    }
}

function parse(text) {
    try {
        const value = typeof text === "string" ? JSON.parse(text) : null;
        return isObject(value) ? value : null;
    } catch {
        return null;
    }
}

export class Client {
    #url;
    #token;
    #handlers;
    #subscription;
    #replica;
    #socketClass;
    #random;
    #connection = null;
    #live = deferred();
    #failures = 0;
    #refusals = 0;
    #authFailed = false;
    #lastEnd = null;
    #answers = new Map();
    #pushes = [];
    #published = "[0,{}]";
    #number = 0;
    #isClosing = false;
    #user = null;
    #over = deferred();
    #wake = deferred();
    #some = deferred();
    #progress = deferred();
    #opening = null;
    #sleeping = new Set();
    #quietUntil = 0;
    #isBehind = false;
    #isCatchingUp = false;

    /** Why the client has ended: `{ ended, detail, unacknowledged }`; null while it lives. */
    closed = null;
    /** Seconds of the last ping. */
    latencyS = null;
    /** The last events of the connection, with their times in epoch milliseconds. */
    story = [];

    /**
     * @param {string | string[] | ((attempt) => string | Promise<string>)} url of the API; several are tried in turn.
     * @param {string | ((attempt) => string | Promise<string>)} token for each attempt. `attempt.authFailed`: the last
     *     one was refused, or may have been: browsers do not say why a handshake failed.
     * @param {object} options `onPush(message)`, `onState(state, version)`, `onEvent(event)`, and the numbers of
     *     DEFAULTS. For tests: `WebSocket`, `random`.
     */
    constructor(url, token, { onPush, onState, onEvent, WebSocket, random, ...numbers } = {}) {
        const unknown = Object.keys(numbers).filter((name) => !Object.hasOwn(DEFAULTS, name));
        if (unknown.length) throw new TypeError(`there is no option ${unknown.join(", ")}`);
        for (const [name, value] of Object.entries(numbers)) {
            if (!(typeof value === "number" && value >= 0)) throw new TypeError(`${name} is ${value}; it must be a number`);
        }
        this.options = Object.freeze({ ...DEFAULTS, ...numbers });
        this.#url = url;
        this.#token = token;
        this.#handlers = { onPush, onState, onEvent };
        this.#subscription = new Subscription(this.options.maxEvents, (event) => this.#handle(event));
        this.#replica = new Replica(this.options, (change, error) => this.#failed(change, error));
        this.#socketClass = WebSocket ?? globalThis.WebSocket;
        this.#random = random ?? Math.random;
        globalThis.addEventListener?.("online", this.#noticed);
        globalThis.document?.addEventListener("visibilitychange", this.#noticed);
        this.#run();
        this.#submit();
    }

    // The state

    /** A copy of the state, with the changes that are not acknowledged yet. */
    get state() {
        return JSON.parse(JSON.stringify(this.#replica.state));
    }

    /** The last version that a server sent; 0 before the first. */
    get version() {
        return this.#replica.version;
    }

    /** The region of that server. */
    get region() {
        return this.#replica.region;
    }

    /** Changes that no server has, oldest first. */
    get unacknowledged() {
        return this.#replica.unacknowledged;
    }

    get isConnected() {
        return this.#connection !== null;
    }

    /** Wait until a connection is live and the state is known. */
    async ready(timeoutS = null) {
        await within(timeoutS, this.#liveConnection(), "there is no connection; the client goes on connecting");
    }

    /** Ask the server for the state, and wait for a server if there is none. */
    async get(timeoutS = 30) {
        let isLate = false;
        const asking = async () => {
            while (!isLate && !(await this.#read(await this.#liveConnection()))) await this.#sleep(0.1);
        };
        try {
            await within(timeoutS, asking(), "no server has sent the state; the client goes on");
        } finally {
            isLate = true;
        }
        return this.state;
    }

    /**
     * Change the state by a JSON merge patch; a promise of the version that it made. `state` has it at once.
     *
     * It overwrites the same members of others, and a list is one value: to compute from the state, use `update`. With
     * `version` it is made upon that version of the state alone, or ends with VersionConflict.
     */
    set(patch, { version = null } = {}) {
        return promised(() => {
            if (!isObject(patch)) throw new TypeError(NO_PATCH);
            if (version !== null && !(Number.isSafeInteger(version) && version >= 0)) {
                throw new TypeError(`version is ${version}; give the one that you have seen, such as client.version`);
            }
            return this.#add(patch, version);
        });
    }

    /**
     * Change the state by the merge patch that a function returns for it; a promise of the version that it made.
     *
     * The function is called again for each new state until a server takes a patch for the state that it has. It must
     * only compute, and quickly. Its error ends the update.
     */
    update(make) {
        return promised(() => {
            if (typeof make !== "function") throw new TypeError("update takes a function that returns a patch for a state");
            return this.#add(make);
        });
    }

    /** Wait until a server has every change, also those that are sent again. */
    async flush(timeoutS = null) {
        const all = async () => {
            while (this.unacknowledged.length) {
                this.#check();
                await this.#progress.promise;
            }
        };
        await within(timeoutS, all(), "some changes are not acknowledged yet; they stay");
    }

    /** Drop the connection and connect again at once. */
    reconnect(reason = "asked to") {
        this.#connection?.leave({ code: 1000, detail: reason, isPlanned: true });
    }

    /** End, within `flushS` and `closeTimeoutS`; a promise of the reason. */
    async close({ flushS = 0 } = {}) {
        if (flushS && this.closed === null) await this.flush(flushS).catch(() => {});
        this.#end({ ended: "asked", detail: "" });
        return this.#over.promise;
    }

    /** A promise of the reason why the client has ended. */
    waitClosed() {
        return this.#over.promise;
    }

    // For connections

    heard(latencyS) {
        this.latencyS = latencyS;
        this.#replica.heard(seconds());
    }

    throttled(pauseS) {
        this.#quietUntil = seconds() + pauseS;
        this.#publish({ type: "throttled", pauseS });
    }

    nextId() {
        this.#number += 1;
        return String(this.#number);
    }

    newId() {
        const bits = globalThis.crypto.getRandomValues(new Uint8Array(16));
        return Array.from(bits, (one) => one.toString(16).padStart(2, "0")).join("");
    }

    pushed({ id, message }) {
        if (typeof id === "string") {
            if (this.#pushes.includes(id)) return;
            this.#pushes.push(id);
            if (this.#pushes.length > PUSHES_KNOWN) this.#pushes.shift();
        }
        this.#publish({ type: "push", message });
    }

    changed({ change, version, patch, region }) {
        if (!Number.isInteger(version) || typeof change !== "string") return;
        if (this.#replica.changed(change, version, isObject(patch) ? patch : null, region ?? null)) this.#catchUp();
        this.#publishState();
    }

    // Inside: connecting

    async #run() {
        while (!this.#isClosing) {
            const opened = await this.#attempt();
            const end = opened instanceof Connection ? await this.#hold(opened) : opened;
            if (this.#isClosing) return;
            if (end.isFinal) {
                this.#end({ ended: end.isFinal, detail: end.detail });
                return;
            }
            await this.#waitAfter(end);
        }
    }

    /** A connection whose peer has sent the state, or the end of the attempt. */
    async #attempt() {
        const { openTimeoutS } = this.options;
        const attempt = { number: this.#failures + 1, authFailed: this.#authFailed, lastEnd: this.#lastEnd };
        let connection = null;
        let detail = "no URL or no token";
        try {
            const url = await within(openTimeoutS, this.#given(this.#url, attempt), "the URL function took too long");
            const token = await within(openTimeoutS, this.#given(this.#token, attempt), "the token function took too long");
            if (this.#isClosing) return {};
            if (typeof token !== "string" || !/^[\w.~+-]+$/.test(token)) {
                return { isFinal: "configuration", detail: "the token is none: the function must return the text of a JWT" };
            }
            const user = subject(token);
            if (this.#user !== null && user !== this.#user) {
                const detail = "the token is another user's: close this client, and make one for that user";
                return { isFinal: "configuration", detail };
            }
            this.#user = user;
            let socket;
            try {
                socket = new this.#socketClass(url, [SUBPROTOCOL, `bearer.${token}`]);
            } catch (error) {
                return { isFinal: "configuration", detail: `the URL is none of a WebSocket (${error.name})` };
            }
            detail = "the handshake failed";
            connection = this.#opening = new Connection(this, socket);
            const opening = new Promise((resolve) => (socket.onopen = () => resolve(null)));
            const first = Promise.race([opening, connection.ended.promise]);
            const early = await within(openTimeoutS, first, "the handshake took too long");
            if (early !== null) return { ...early, detail: `the handshake failed (${early.detail})`, hasFailed: true };
            if (!(await this.#read(connection))) {
                const end = connection.isOver ? await connection.ended.promise : { code: 1006, detail: "getState was not answered" };
                connection.leave(end);
                return end;
            }
            return connection;
        } catch (error) {
            connection?.leave({ code: 1006, detail });
            return { code: 1006, detail: `${detail}: ${error.message}`, hasFailed: connection !== null };
        } finally {
            this.#opening = null;
        }
    }

    async #given(source, attempt) {
        if (Array.isArray(source)) return source[(attempt.number - 1) % source.length];
        return typeof source === "function" ? source(attempt) : source;
    }

    /** The end of the connection, or of the last one that took its place. */
    async #hold(connection) {
        let isRotated = false;
        for (;;) {
            if (this.#isClosing) {
                connection.leave({});
                return {};
            }
            this.#connection = connection;
            this.#authFailed = false;
            connection.watch();
            this.#live.resolve(connection);
            this.#publish({ type: "connected", region: this.region, version: this.version, isRotated });
            this.#publishState();
            const stable = setTimeout(() => (this.#failures = this.#refusals = 0), this.options.stableAfterS * 1000);
            const next = await this.#untilOld(connection);
            clearTimeout(stable);
            if (!(next instanceof Connection)) {
                this.#connection = null;
                this.#live = deferred();
                return { ...next, wasLive: true };
            }
            this.#connection = connection = next;
            isRotated = true;
        }
    }

    /** Its end, or the connection that takes its place. */
    async #untilOld(connection) {
        const { rotateAfterS, rotationRetryS, closeTimeoutS } = this.options;
        let leftS = rotateAfterS * (1 - 0.1 * this.#random());
        for (;;) {
            let timer;
            const old = new Promise((resolve) => (timer = setTimeout(() => resolve(null), leftS * 1000)));
            const end = await Promise.race([connection.ended.promise, old]);
            clearTimeout(timer);
            if (end !== null) return end;
            const opened = await this.#attempt();
            if (opened instanceof Connection) {
                // The answer of the old one comes behind all that the server sent over it before.
                await connection.ask("ping", {}, closeTimeoutS);
                this.#live = deferred();
                connection.leave({ code: 1000, detail: "replaced" });
                return opened;
            }
            if (opened.isFinal || connection.isOver) return connection.isOver ? connection.ended.promise : opened;
            this.#judge(opened);
            leftS = rotationRetryS;
        }
    }

    /** What the next attempt needs to know of an end. */
    #judge(end) {
        const isRefused = REFUSED_CODES.includes(end.code);
        this.#lastEnd = end;
        this.#authFailed = this.#authFailed || isRefused || Boolean(end.hasFailed);
        this.#refusals += isRefused;
    }

    async #waitAfter(end) {
        const { backoffBaseS, backoffCapS, refusals, fleet } = this.options;
        this.#judge(end);
        if (this.#refusals >= refusals) {
            const detail = `refused ${this.#refusals} times; look at issuer, audience and expiry of the token`;
            this.#end({ ended: "refused", detail });
            return;
        }
        const ceiling = Math.min(backoffCapS, backoffBaseS * 2 ** Math.min(this.#failures, 62));
        const spread = end.wasLive && !this.#failures ? this.#random() * (fleet / CONNECTS_A_SECOND) : 0;
        let delayS = spread + Math.max(FLOOR_S, this.#random() * ceiling);
        if (end.isPlanned && !this.#failures) delayS = 0;
        else if (end.code === 1012) delayS = 5 + this.#random() * 25;
        else if (end.code === 1013) delayS = 30 + this.#random() * 15;
        this.#failures += 1;
        const reason = `${end.detail || "the connection ended"}; next attempt in ${delayS.toFixed(1)} s`;
        this.#publish({ type: "disconnected", reason, wasConnected: Boolean(end.wasLive) });
        this.#wake = deferred();
        await Promise.race([this.#sleep(delayS), this.#wake.promise]);
    }

    /** The page is visible again, or the network is back: check the connection now. */
    #noticed = () => {
        if (globalThis.document?.visibilityState === "hidden") return;
        this.#connection?.probe();
        if (this.#connection === null) setTimeout(() => this.#wake.resolve(), this.#random() * 1000);
    };

    async #liveConnection() {
        for (;;) {
            this.#check();
            if (this.#connection !== null && !this.#connection.isOver) return this.#connection;
            await this.#live.promise;
            if (this.#connection?.isOver) await this.#sleep(0.01); // its end is about to be handled
        }
    }

    /** Wait for the end of a pause that the server asked for. */
    async #pause() {
        for (let leftS; !this.#isClosing && (leftS = this.#quietUntil - seconds()) > 0; ) await this.#sleep(leftS);
    }

    async #read(connection) {
        let answer;
        do {
            await this.#pause();
            answer = await connection.ask("getState", { known_version: this.version });
        } while (isThrottled(answer) && !this.#isClosing);
        if (answer?.type !== "state" || !Number.isInteger(answer.version) || !isObject(answer.state)) return false;
        const { state, version, region, client_ahead: isBehind } = answer;
        this.#again(this.#replica.observed(state, version, region ?? null, seconds(), isBehind === true));
        return true;
    }

    /** Read the state: patches of other connections are missing. */
    async #catchUp() {
        this.#isBehind = true;
        if (this.#isCatchingUp) return;
        this.#isCatchingUp = true;
        for (let failures = 0; this.#isBehind && !this.#isClosing; failures += 1) {
            const connection = await this.#liveConnection().catch(() => null);
            if (connection === null) break;
            this.#isBehind = false;
            if (await this.#read(connection)) failures = 0;
            else {
                this.#isBehind = true;
                await this.#sleep(this.#passing(failures));
            }
        }
        this.#isCatchingUp = false;
    }

    // Inside: changes

    #add(patch, expected = null) {
        this.#check();
        if (this.#replica.isFull) {
            const limit = this.options.maxUnacknowledged;
            throw new LimitReached(`${limit} changes wait for a server (maxUnacknowledged): wait for one of them`);
        }
        const id = this.newId();
        this.#replica.add(id, patch, expected);
        const answer = deferred();
        this.#answers.set(id, answer);
        this.#publishState();
        this.#some.resolve();
        return answer.promise;
    }

    /** Send changes to the server, one at a time, each under the same id until a server has it. */
    async #submit() {
        const tries = { failures: 0, conflicts: 0, internal: 0, tooBig: 0 };
        while (!this.#isClosing) {
            this.#some = deferred();
            if (!this.#replica.tail.length) {
                await this.#some.promise;
                continue;
            }
            const connection = await this.#liveConnection().catch(() => null);
            await this.#pause();
            const [change] = this.#replica.tail;
            if (connection === null || change === undefined) continue;
            if (this.#replica.isInDoubt(change)) {
                this.#giveUp(change, new ChangeRefused("in doubt", IN_DOUBT), tries);
                continue;
            }
            const sent = this.version;
            const version = this.#replica.versionFor(change);
            this.#replica.sent(change.id, version);
            const about = { version, patch: change.patch, change: change.id };
            let answer = await connection.ask("setState", about);
            if (answer === null && connection.isOver && (await connection.ended.promise).code === TOO_BIG) {
                tries.tooBig += 1; // the second time it is refused
                const message = `the connection was ended with ${TOO_BIG} each time that this change was sent; make it smaller`;
                if (tries.tooBig >= TOO_BIG_TRIES) answer = { type: "error", error: "too_large", message };
            }
            const pauseS = await this.#answered(connection, change, sent, answer, tries);
            if (pauseS) await this.#sleep(pauseS);
        }
    }

    /** Handle an answer; the seconds to wait. */
    async #answered(connection, change, sent, answer, tries) {
        const passing = () => this.#passing(tries.failures++);
        const { type, version, state, region } = answer ?? {};
        if (type === "saved" && Number.isInteger(version)) {
            startAfresh(tries);
            const isStale = this.#replica.saved(change.id, version, region ?? null, seconds());
            this.#settle(change.id, (one) => one.resolve(version));
            return !isStale || (await this.#read(connection)) ? 0 : passing();
        }
        if (type === "conflict" && Number.isInteger(version) && isObject(state)) {
            const isCertain = change.unanswered === null || version - change.unanswered <= CHANGES_KEPT;
            if (isCertain) this.#replica.sent(change.id, null);
            this.#again(this.#replica.conflict(sent, state, version, region ?? null, seconds()));
            if (change.expected !== null && isCertain) {
                this.#giveUp(change, new VersionConflict(change.expected, version), tries);
                return 0;
            }
            tries.conflicts += 1;
            return tries.conflicts > 1 ? this.#random() * Math.min(2, 0.05 * 2 ** (tries.conflicts - 2)) : 0;
        }
        if (type !== "error") return passing();
        tries.internal += answer.error === "internal";
        if (FINAL_PROBLEMS.includes(answer.error) || tries.internal >= INTERNAL_TRIES) {
            this.#giveUp(change, new ChangeRefused(answer.error, answer.message), tries);
            return 0;
        }
        // No attempt has done anything.
        if (isThrottled(answer) && change.unanswered === null) this.#replica.sent(change.id, null);
        return pauseOf(answer) + passing();
    }

    /** The pause after so many passing failures. */
    #passing(failures) {
        return Math.max(0.01, this.#random() * Math.min(10, 0.2 * 2 ** failures));
    }

    #giveUp(change, error, tries) {
        startAfresh(tries);
        this.#replica.drop(change.id);
        this.#failed(change, error);
    }

    #failed(change, error) {
        // A server had acknowledged it and may have lost it: nothing awaits its answer.
        if (!this.#answers.has(change.id) && this.closed === null) report(error);
        this.#settle(change.id, (one) => one.reject(error));
    }

    #settle(id, settle) {
        this.#progress.resolve();
        this.#progress = deferred();
        const answer = this.#answers.get(id);
        this.#answers.delete(id);
        if (answer !== undefined) settle(answer);
        this.#publishState();
    }

    #again([changes, isCertain]) {
        if (changes) {
            this.#publish({ type: "resubmitted", changes, isCertain, region: this.region });
            this.#some.resolve();
        }
        this.#publishState();
    }

    // Inside: events and the end

    #publish(event) {
        const dated = { at: Date.now(), ...event };
        if (dated.type !== "push" && dated.type !== "state") {
            this.story.push(dated);
            if (this.story.length > STORY) this.story.shift();
        }
        this.#subscription.put(dated);
    }

    #publishState() {
        const key = JSON.stringify([this.version, this.#replica.state]);
        if (key === this.#published) return;
        this.#published = key;
        this.#publish({ type: "state", state: this.state, version: this.version, region: this.region });
    }

    async #handle(event) {
        const { onEvent, onPush, onState } = this.#handlers;
        await onEvent?.(event);
        if (event.type === "push") await onPush?.(event.message);
        if (event.type === "state") await onState?.(event.state, event.version);
    }

    #sleep(delayS) {
        if (this.#isClosing) return Promise.resolve();
        return new Promise((resolve) => {
            const wake = () => {
                clearTimeout(timer);
                this.#sleeping.delete(wake);
                resolve();
            };
            const timer = setTimeout(wake, delayS * 1000);
            this.#sleeping.add(wake);
        });
    }

    #check() {
        if (this.closed !== null) throw new ClientClosed(this.closed);
    }

    #end({ ended, detail }) {
        if (this.closed !== null) return;
        this.#isClosing = true;
        this.closed = Object.freeze({ ended, detail, unacknowledged: this.unacknowledged.length });
        globalThis.removeEventListener?.("online", this.#noticed);
        globalThis.document?.removeEventListener("visibilitychange", this.#noticed);
        this.#connection?.leave({ code: 1000, detail: "closed" });
        this.#opening?.leave({ code: 1000, detail: "closed" });
        this.#connection = null;
        for (const answer of this.#answers.values()) answer.reject(new ClientClosed(this.closed));
        this.#answers.clear();
        this.#publish({ type: "closed", reason: this.closed });
        for (const wake of [...this.#sleeping]) wake();
        for (const one of [this.#live, this.#some, this.#wake, this.#progress]) one.resolve();
        this.#over.resolve(this.closed);
    }
}
