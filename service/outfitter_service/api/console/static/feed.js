// Keeps the fleet current: reads the pages, follows the stream, and knows how old the picture is.
import { ApiError } from "./api.js";
import { Fleet } from "./fleet.js";

const SILENT_MS = 25_000; // the API sends a sign of life every 10 s
const STATUS_MS = 10_000;
const BACKOFF_MS = [1_000, 10_000];
const LETTERS_MS = 3_600_000;

/** `fleet`: null until the pages were read. `phase`: "starting", "token", "live" or "lost"; `reason` says why it is not
 * live. `status`: the API's own. `pictureAt`: the moment up to which the picture is known, on this machine's clock. */
export class Feed {
  constructor(api, { changed, stepped }) {
    this.api = api;
    this.fleet = null;
    this.phase = "starting";
    this.reason = "";
    this.status = {};
    this.pictureAt = 0;
    this.changed = changed; // the picture or the phase is another
    this.stepped = stepped; // something happened to a host: its name
    this.tokenWasWrong = false;
    this.lastId = null;
    this.heardAt = 0;
    this.stream = null;
    this.wake = () => {};
  }

  get outage() {
    return this.status.outage ?? null;
  }

  get isLive() {
    return this.phase === "live" && !this.outage;
  }

  /** Milliseconds since the picture was true. */
  get age() {
    return Date.now() - this.pictureAt;
  }

  /** Go on for ever. */
  async run() {
    setInterval(() => this.#watch(), 1_000);
    setInterval(() => this.#readStatus(), STATUS_MS);
    let delay = BACKOFF_MS[0];
    for (;;) {
      try {
        if (this.lastId === null) await this.#load();
        delay = BACKOFF_MS[0];
        if (await this.#follow()) continue;
        this.#say("lost", "the stream of events has ended");
      } catch (error) {
        this.#say(this.fleet ? "lost" : "starting", error.message);
        if (error.status === 401) await this.#askForToken();
        else if (!(error instanceof ApiError)) console.error(error);
      }
      await this.#pause(delay);
      delay = Math.min(delay * 2, BACKOFF_MS[1]);
    }
  }

  /** Try at once. */
  retry() {
    this.wake();
  }

  giveToken(token) {
    this.api.token = token;
    this.wake();
  }

  #say(phase, reason = "") {
    this.phase = phase;
    this.reason = reason;
    this.changed();
  }

  async #askForToken() {
    this.tokenWasWrong = this.api.hasToken;
    this.#say("token");
    await new Promise(resolve => (this.wake = resolve));
    this.#say(this.fleet ? "lost" : "starting", "asking with the token");
  }

  #pause(delay) {
    return new Promise(resolve => {
      const timer = setTimeout(resolve, delay);
      this.wake = () => (clearTimeout(timer), resolve());
    });
  }

  /** Read all pages into a new picture. */
  async #load() {
    this.status = (await this.api.page("status")).body;
    let lastId = null;
    const hosts = [];
    for await (const { items, eventId } of this.api.pages("hosts")) {
      lastId ??= eventId;
      hosts.push(...items);
    }
    const since = new Date(this.api.now - LETTERS_MS).toISOString();
    const [devices, queue, failed, letters] = await Promise.all([
      this.api.all("devices"),
      this.api.all("queue"),
      this.api.all("workers", { state: "failed" }),
      this.api.all("dead-letters", { since }).catch(error => (error.status === 503 ? [] : Promise.reject(error))),
    ]);
    const fleet = new Fleet();
    fleet.restore(hosts, devices, queue, failed, letters);
    this.fleet = fleet;
    this.lastId = lastId;
    this.#heard();
    this.changed();
  }

  /** Follow the stream until it ends. Returns whether the pages must be read again: events are missing. */
  async #follow() {
    this.stream = new AbortController();
    this.heardAt = Date.now();
    try {
      await this.api.follow(this.lastId, this.stream.signal, events => this.#apply(events));
    } catch (error) {
      if (this.lastId !== null) throw this.stream.signal.aborted ? new ApiError(0, "the API is silent") : error;
    } finally {
      this.stream = null;
    }
    return this.lastId === null;
  }

  #apply(events) {
    if (events.some(event => event.kind === "reset")) {
      this.lastId = null;
      this.stream.abort();
      return;
    }
    this.#heard();
    for (const event of events) {
      this.lastId = event.id;
      if (event.kind) this.#applyOne(event);
    }
    if (this.phase !== "live") this.#say("live");
    else if (events.some(event => event.kind)) this.changed();
  }

  /** One event that we do not understand costs itself only. */
  #applyOne(event) {
    try {
      this.fleet.apply(event);
      this.stepped(hostOf(event));
    } catch (error) {
      console.error("an event could not be applied", error);
    }
  }

  #heard() {
    this.heardAt = Date.now();
    if (!this.outage) this.pictureAt = this.heardAt;
  }

  #watch() {
    if (this.stream && Date.now() - this.heardAt > SILENT_MS) this.stream.abort();
  }

  /** Ask whether the API itself still reads the bus. The stream alone does not say it. */
  async #readStatus() {
    if (this.phase !== "live") return;
    const { body } = await this.api.page("status").catch(() => ({}));
    if (!body) return;
    const { outage } = this;
    this.status = body;
    if (body.outage && body.as_of) this.pictureAt = Date.now() - (this.api.now - Date.parse(body.as_of));
    if (body.outage !== outage) this.changed();
  }
}

/** The host that an event is about; undefined: none. A note of history has its writer as its key: `host/NAME`. */
function hostOf({ data }) {
  const [first, second] = (data.key ?? data.message_key ?? "").split("/");
  return data.record?.host ?? (first === "host" || first.startsWith("@") ? second : first);
}
