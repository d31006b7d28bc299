// The state of all hosts, from the API's pages, kept current by its events.
//
// A host is replaced and never changed in place, so that a view knows by identity what it need not draw again. Events
// may already be in a page: each one replaces what it is about, so it may be applied twice.

export const STATES = ["unhealthy", "unknown", "cordoned", "held", "free"];
const HOLDING = new Set(["preparing", "allocated", "releasing"]);
const NEWEST = new Set(["pending", "preparing", "allocated"]); // no other run of the worker is newer
const UNREPORTED = "its driver does not report it";
const KEPT = 1000; // failed workers and refused messages that are kept
const FAILING = new Set(["driver-failed", "misconfigured", "no-driver"]);

export const isFailing = resource => FAILING.has(resource.state);

/** A device's state in one word; the worst that is true of it. */
export function stateOf(device, host) {
  if (device.health === "unhealthy") return "unhealthy";
  if (device.health === "unknown") return "unknown";
  if (device.state) return "cordoned";
  if (device.holders.length) return "held";
  return host.managed ? "free" : "unknown";
}

/** A host with what follows from it: `counts` of devices by state, `holders`, `weight` (how bad it is) and `text` to
 * find it by. */
function completed(host) {
  const counts = {}, holders = new Set(), text = [host.name];
  for (const device of host.devices) {
    const state = stateOf(device, host);
    counts[state] = (counts[state] ?? 0) + 1;
    text.push(device.id);
    for (const holder of device.holders) holders.add(holder.worker);
  }
  for (const waiter of host.waiting) text.push(waiter.worker);
  const users = holders.size + host.waiting.length;
  const failing = Object.values(host.resources ?? {}).filter(isFailing).length;
  const unserved = host.managed ? 0 : users ? 1e6 : 1e3;
  const { unhealthy = 0, unknown = 0, cordoned = 0 } = counts;
  const weight = unserved + failing * 1e4 + unhealthy * 100 + unknown + cordoned / 1e3;
  return { ...host, counts, holders, weight, failing, text: [...text, ...holders].join("\n").toLowerCase() };
}

const nameless = name => ({
  name, managed: false, manager: null, since: null, resources: null, devices: [], waiting: [],
});

const isOf = (holder, worker, incarnation) => holder.worker === worker && holder.incarnation === incarnation;

/** A waiting worker, from an item of the queue's page or from a record. */
const waiterOf = record => ({
  host: record.host, worker: record.worker, incarnation: record.incarnation, since: record.since,
  position: record.queue_position, amounts: record.amounts ?? record.request.amounts, reason: record.reason,
  code: record.reason_code, until: record.wait_until,
});

const inOrder = waiting => waiting.sort((a, b) => (a.position ?? Infinity) - (b.position ?? Infinity));

export class Fleet {
  constructor() {
    this.hosts = new Map();
    this.failed = new Map(); // by allocation key
    this.letters = []; // the newest last
  }

  /** Fill it from the items of pages. */
  restore(hosts, devices, queue, failed, letters) {
    const parts = new Map();
    for (const item of hosts) {
      const { host: name, managed, manager, since, resources } = item;
      parts.set(name, { ...nameless(name), managed, manager, since, resources });
    }
    const part = name => parts.get(name) ?? parts.set(name, nameless(name)).get(name);
    for (const device of devices) part(device.host).devices.push(device);
    for (const item of queue) part(item.host).waiting.push(waiterOf(item));
    for (const [name, host] of parts) this.hosts.set(name, completed(host));
    for (const worker of failed) this.failed.set(`${worker.host}/${worker.worker}/${worker.incarnation}`, worker);
    this.letters = letters.toReversed();
  }

  /** Apply one event. */
  apply({ kind, data }) {
    if (kind === "dead-letter") this.#addLetter(data);
    else if (kind === "allocation") this.#putAllocation(data.key, data.record);
    else if (kind === "host") this.#putHost(data.key.slice("@host/".length), data.record);
    else if (kind === "device") this.#putDevice(data.key, data.record);
  }

  #addLetter(letter) {
    this.letters = [...this.letters.slice(-KEPT), letter];
  }

  #putAllocation(key, record) {
    const [name, worker, incarnation] = key.split("/");
    const host = this.hosts.get(name) ?? nameless(name);
    const waiting = host.waiting.filter(waiter => !isOf(waiter, worker, incarnation));
    if (record?.state === "pending") inOrder((waiting.push(waiterOf(record)), waiting));
    this.#put({ ...host, waiting, devices: devicesAfter(host, worker, incarnation, record) });
    if (NEWEST.has(record?.state)) this.#dropFailed(`${name}/${worker}/`);
    if (record?.state === "failed") this.#addFailed(key, record);
    else this.failed.delete(key);
  }

  /** Drop the failed runs of a worker, of which a newer run is shown. */
  #dropFailed(prefix) {
    for (const key of this.failed.keys()) if (key.startsWith(prefix)) this.failed.delete(key);
  }

  #addFailed(key, { host, worker, incarnation, since, reason }) {
    this.failed.set(key, { host, worker, incarnation, since, reason });
    if (this.failed.size > KEPT) this.failed.delete(this.failed.keys().next().value);
  }

  #putHost(name, record) {
    const host = this.hosts.get(name) ?? nameless(name);
    const known = new Map(host.devices.map(device => [device.id, device])), devices = [], resources = {};
    for (const [resource, inventory] of Object.entries(record?.resources ?? {})) {
      const { state, reason, amount, sharing, devices: listed = [] } = inventory;
      const total = inventory.total ?? listed.length;
      resources[resource] = { state, reason, amount, sharing, total, healthy: inventory.healthy };
      for (const { id, health = "healthy", reason: why, properties } of listed) {
        const { holders = [], state: apart = null, reason: former } = known.get(id) ?? {};
        const said = why ?? (apart ? former : null);
        const device = { host: name, resource, id, health, reason: said, sharing, state: apart, properties, holders };
        devices.push({ ...device, listed: true });
        known.delete(id);
      }
    }
    const short = shortLists(resources, devices);
    for (const device of known.values()) if (device.holders.length) devices.push(unlisted(device, short));
    const { manager = null, since = null } = record ?? {};
    const managed = record !== null && !manager.stopped_at;
    const next = { ...host, managed, manager, since, devices, resources: record && resources };
    if (record === null && !devices.length && !host.waiting.length) this.hosts.delete(name);
    else this.#put(next);
  }

  #putDevice(key, record) {
    const [, name, encoded] = key.split("/"), id = decodeURIComponent(encoded), host = this.hosts.get(name);
    const state = record?.state ?? null;
    const reasonOf = device => (device.health === "healthy" ? record?.reason ?? null : device.reason);
    const change = device => ({ ...device, state, reason: reasonOf(device) });
    const devices = host?.devices.map(device => (device.id === id ? change(device) : device));
    if (host) this.#put({ ...host, devices });
  }

  #put(host) {
    this.hosts.set(host.name, completed(host));
  }
}

/** The resources of which a host's record has no room for all devices. */
function shortLists(resources, devices) {
  const listed = {};
  for (const device of devices) if (device.listed) listed[device.resource] = (listed[device.resource] ?? 0) + 1;
  return new Set(Object.keys(resources ?? {}).filter(name => resources[name].total > (listed[name] ?? 0)));
}

/** A held device that its host's record does not list. If there is no room, its holder's record has its health. */
function unlisted(device, short) {
  if (!short.has(device.resource)) return { ...device, listed: false, health: "unknown", reason: UNREPORTED };
  const { health = "healthy", "health.reason": reason = null } = device.holders.at(-1).info ?? device.properties;
  return { ...device, listed: false, health, reason };
}

/** A host's devices after a run's record has changed (null: it was deleted). */
function devicesAfter(host, worker, incarnation, record) {
  const held = heldBy(record), devices = [], short = shortLists(host.resources, host.devices);
  const holder = ({ properties: info, shared }) => {
    const { state, token, since, delayed_by } = record;
    return { worker, incarnation, state, token, since, delayed_by, shared, info };
  };
  for (const device of host.devices) {
    const others = device.holders.filter(each => !isOf(each, worker, incarnation));
    if (held.has(device.id)) {
      const next = { ...device, holders: [...others, holder(held.get(device.id))] };
      devices.push(device.listed ? next : unlisted(next, short));
    } else if (others.length === device.holders.length) devices.push(device);
    else if (others.length || device.listed) devices.push({ ...device, holders: others });
  }
  const known = new Set(devices.map(device => device.id));
  for (const [id, of] of held) {
    const { resource, properties } = of, holders = [holder(of)];
    const device = { host: host.name, resource, id, sharing: "exclusive", state: null, properties, holders };
    if (!known.has(id)) devices.push(unlisted(device, short));
  }
  return devices;
}

/** The devices that a record's run holds, by id. */
function heldBy(record) {
  const held = new Map();
  if (!HOLDING.has(record?.state)) return held;
  for (const [resource, infos] of Object.entries(record.resources ?? {}))
    for (const properties of infos) {
      const shared = (record.shared ?? []).includes(resource) && (held.get(properties.id)?.shared ?? true);
      if (properties.id) held.set(properties.id, { resource, properties, shared });
    }
  return held;
}
