// Reads the API: its pages, and its stream of events. The token is kept for this tab's session only.

const TOKEN = "outfitter-token";
const PAGE = 1000;

// Control characters, invisible ones, and those that turn the direction of other text. We show no text with them.
const HIDDEN = /[\u0000-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;
const escape = text => text.replace(HIDDEN, sign => `\\u${sign.charCodeAt(0).toString(16).padStart(4, "0")}`);

/** A value of the API's JSON with its hidden characters escaped, as the command line shows them. */
function escaped(_, value) {
  if (typeof value === "string") return escape(value);
  if (value === null || typeof value !== "object" || Array.isArray(value)) return value;
  return Object.keys(value).every(key => escape(key) === key) ? value
    : Object.fromEntries(Object.entries(value).map(([key, each]) => [escape(key), each]));
}

/** An answer that is no page. `status`: of HTTP, 0 if there was no answer at all. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export class Api {
  /** `base`: the address of the API's version, with a slash at the end. */
  constructor(base) {
    this.base = base;
    this.skew = 0; // milliseconds that the server's clock is ahead of ours, to a second
  }

  set token(value) {
    sessionStorage.setItem(TOKEN, value);
  }

  get hasToken() {
    return sessionStorage.getItem(TOKEN) !== null;
  }

  /** The server's time in milliseconds. */
  get now() {
    return Date.now() + this.skew;
  }

  /** The body of a page, and the last event that it has. */
  async page(path, parameters = {}) {
    const query = new URLSearchParams(parameters);
    const answer = await this.#request(`${path}${query.size ? `?${query}` : ""}`);
    const date = Date.parse(answer.headers.get("Date"));
    if (date) this.skew = date - Date.now();
    return { body: JSON.parse(await answer.text(), escaped), eventId: answer.headers.get("Outfitter-Event-Id") };
  }

  /** All items of a list. `seen` gets the last event that each of its pages has. */
  async all(path, parameters = {}, seen = () => {}) {
    const items = [];
    for (let cursor; cursor !== null; ) {
      const { body, eventId } = await this.page(path, { limit: PAGE, ...parameters, ...(cursor && { cursor }) });
      seen(eventId);
      items.push(...body.items);
      cursor = body.next;
    }
    return items;
  }

  /** Follow the events after `lastId` until the stream ends. `heard` gets those of each piece, maybe none. */
  async follow(lastId, signal, heard) {
    const answer = await this.#request("events", { signal, headers: { "Last-Event-ID": lastId }, cache: "no-store" });
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    const parse = eventParser();
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      heard(parse(value));
    }
  }

  async #request(path, { headers = {}, ...options } = {}) {
    const token = sessionStorage.getItem(TOKEN);
    const access = token ? { Authorization: `Bearer ${token}` } : {};
    let answer;
    try {
      answer = await fetch(this.base + path, { headers: { ...headers, ...access }, ...options });
    } catch (error) {
      if (options.signal?.aborted) throw error;
      throw new ApiError(0, "the API does not answer");
    }
    if (answer.ok) return answer;
    const problem = await answer.json().catch(() => ({}));
    throw new ApiError(answer.status, problem.detail ?? `the API answers ${answer.status}`);
  }
}

/** Turns pieces of a stream into its events: `id`, `kind`, and `data` (undefined: a sign of life). */
export function eventParser() {
  let rest = "", event = {};
  return piece => {
    const lines = (rest + piece).split("\n"), events = [];
    rest = lines.pop();
    for (const line of lines) {
      const colon = line.indexOf(": "), value = line.slice(colon + 2);
      if (line === "") {
        if (event.id !== undefined) events.push(event);
        event = {};
      } else if (line.startsWith("id: ")) event.id = value;
      else if (line.startsWith("event: ")) event.kind = value;
      else if (line.startsWith("data: ")) event.data = JSON.parse(value, escaped);
    }
    return events;
  };
}
