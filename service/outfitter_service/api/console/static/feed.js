// Keeps the fleet current: reads the pages, follows the stream, and knows how old the picture is.
import { ApiError } from "./api.js";
import { Fleet } from "./fleet.js";

const SILENT_MS = 25_000; // the API sends a sign of life every 10 s
const STATUS_MS = 10_000;
const BACKOFF_MS = [1_000, 10_000];
const TROUBLES_MS = 1_000; // how long after the troubles were read they are read again, if something has changed
const RECOUNT_MS = 5_000; // how long after a change the holders of a crowded device are counted again

/** `fleet`: null until the pages were read. `troubles`: what needs a person, as the API says it. `phase`: "starting",
 * "token", "live" or "lost"; `reason` says why it is not live. `status`: the API's own. `pictureAt`: the moment up to
 * which the picture is known, on this machine's clock. */
export class Feed {
  constructor(api, { changed, stepped, refused }) {
    this.api = api;
    this.fleet = null;
    this.phase = "starting";
    this.reason = "";
    this.status = {};
    this.troubles = [];
    this.pictureAt = 0;
    this.changed = changed; // the picture or the phase is another
    this.stepped = stepped; // something happened to a host: its name
    this.refused = refused; // a token is needed
    this.tokenWasWrong = false;
    this.lastId = null;
    this.heardAt = 0;
    this.stream = null;
    this.wake = () => {};
    this.areTroublesOld = false;
    this.readsTroubles = false;
    this.recounted = new Set(); // hosts whose devices will be read again
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
    this.refused();
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
    const ids = [], seen = id => ids.push(id);
    const [{ body: status }, hosts, devices, queue, troubles] = await Promise.all([
      this.api.page("status"),
      this.api.all("hosts", {}, seen),
      this.api.all("devices", {}, seen),
      this.api.all("queue", {}, seen),
      this.api.all("troubles", {}, seen),
    ]);
    const fleet = new Fleet();
    fleet.restore(hosts, devices, queue);
    Object.assign(this, { fleet, status, troubles, lastId: earliest(ids) });
    this.#heard();
    this.changed();
  }

  /** Read the troubles again, soon after those of before. */
  async #readTroubles() {
    this.areTroublesOld = true;
    if (this.readsTroubles) return;
    this.readsTroubles = true;
    try {
      for (; this.areTroublesOld; await new Promise(resolve => setTimeout(resolve, TROUBLES_MS))) {
        this.areTroublesOld = false;
        this.troubles = await this.api.all("troubles");
        this.changed();
      }
    } catch {
      // the stream says what is wrong, or the next look
    } finally {
      this.readsTroubles = false;
    }
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
    const isNews = events.some(event => event.kind);
    if (isNews) this.#readTroubles();
    if (this.phase !== "live") this.#say("live");
    else if (isNews) this.changed();
  }

  /** One event that we do not understand costs itself only. */
  #applyOne(event) {
    try {
      const host = hostOf(event), { fleet } = this;
      fleet.apply(event);
      this.stepped(host);
      if (event.kind !== "step" && fleet.isCrowded(host)) this.#recountSoon(fleet, host);
    } catch (error) {
      console.error("an event could not be applied", error);
    }
  }

  #recountSoon(fleet, host) {
    if (this.recounted.has(host)) return;
    this.recounted.add(host);
    setTimeout(() => this.#recount(fleet, host).catch(() => {}), RECOUNT_MS);
  }

  async #recount(fleet, host) {
    this.recounted.delete(host);
    const devices = await this.api.all("devices", { host });
    if (fleet !== this.fleet) return;
    fleet.replaceDevices(host, devices);
    this.changed();
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
    this.#readTroubles();
    const { body } = await this.api.page("status").catch(() => ({}));
    if (!body) return;
    const { outage } = this;
    this.status = body;
    if (body.outage && body.as_of) this.pictureAt = Date.now() - (this.api.now - Date.parse(body.as_of));
    if (body.outage !== outage) this.changed();
  }
}

/** The earliest of some events: `NAME-NUMBER`, with another name after each restart of the API. */
function earliest(ids) {
  const split = id => [id.slice(0, id.lastIndexOf("-")), Number(id.slice(id.lastIndexOf("-") + 1))];
  if (new Set(ids.map(id => split(id)[0])).size > 1) throw new ApiError(0, "the API was restarted meanwhile");
  return ids.reduce((first, id) => (split(id)[1] < split(first)[1] ? id : first));
}

/** The host that an event is about; undefined: none. A note of history has its writer as its key: `host/NAME`. */
function hostOf({ data }) {
  const [first, second] = (data.key ?? "").split("/");
  return data.record?.host ?? data.host ?? (first === "host" || first.startsWith("@") ? second : first);
}
