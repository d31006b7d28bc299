// The state of all hosts, from the API's pages, kept current by its events.
//
// A host is replaced and never changed in place, so that a view knows by identity what it need not draw again. Events
// may already be in a page: each one replaces what it is about, so it may be applied twice.

import { inTheWay, wholesIn, withKept } from "./parts.js";

export const STATES = ["unhealthy", "unknown", "stranger", "cordoned", "held", "free"];
const HOLDING = new Set(["preparing", "allocated", "releasing"]);
const UNREPORTED = "its driver does not report it";
const MOST_HOLDERS = 20; // of one device, as in the API's pages
const UNSERVED = new Set(["stopped", "dead"]); // a manager of which nobody gets an answer
const FAILING = new Set(["driver-failed", "misconfigured", "no-driver"]);

export const isFailing = resource => FAILING.has(resource.state);

/** Whether its resource can lend a device to nobody else. A device that workers share is free, too, and one of which
 * there is a replica. */
const isTaken = device => device.kept || inTheWay(device.holders, device).length >= (device.replicas ?? 1);

/** The operators' orders that take a device out. The host's record names one of them. */
export const ordersOf = (device, host) => host.orders.filter(({ id, resource, device: name }) =>
  id === device.cordon || (name ? namesOf(device).includes(name) : !resource || resource === device.resource));

/** An order in words: "rebooted tonight (ada@ops-1, order k3v9-01)". */
export const orderWords = ({ id, author, reason, until }) =>
  `${reason} (${author}, order ${id}${until ? `, until ${until}` : ""})`;

/** The first order about a whole host whose time is not over; undefined: there is none. */
export const hostOrder = host => host.orders.find(({ resource, device, until }) =>
  !resource && !device && (!until || Date.parse(until) > Date.now()));

const byAge = (a, b) => Date.parse(a.since) - Date.parse(b.since) || (a.id < b.id ? -1 : 1);

/** A device's state in one word: that it is cordoned, or else the worst that is true of it. */
export function stateOf(device, host) {
  const isMarked = device.cordon && device.listed; // by the host's record; of others only orders say it
  if (isMarked || (host.orders.length && ordersOf(device, host).length)) return "cordoned";
  if (device.health === "unhealthy") return "unhealthy";
  if (device.health === "unknown") return "unknown";
  if (device.used_by) return "stranger"; // a process uses it to which it was not lent
  if (isTaken(device)) return "held";
  return host.managed ? "free" : "unknown";
}

/** All names of a device: it may be held under another one than its driver's. */
export const namesOf = device => [device.id, ...(device.aliases ?? [])];

/** A worker's labels as people write them: "job=train, team=vision". */
export const labelsOf = worker =>
  Object.entries(worker.labels ?? {}).map(([name, value]) => `${name}=${value}`).sort().join(", ");

/** Each name once, without one. */
const others = (names, id) => [...new Set(names)].filter(name => name !== id);

/** Numbers of devices by state, and by state of each model that drivers name. */
class Totals {
  constructor() {
    this.total = 0;
    this.counts = Object.fromEntries(STATES.map(state => [state, 0]));
    this.models = new Map();
  }

  add(state, number, model) {
    this.total += number;
    this.counts[state] += number;
    if (model) mapped(this.models, model).add(state, number);
  }

  addAll({ counts, models }) {
    for (const state of STATES) this.add(state, counts[state]);
    for (const [model, of] of models) mapped(this.models, model).addAll(of);
  }
}

/** The totals of a name in a map. */
const mapped = (map, name) => map.get(name) ?? map.set(name, new Totals()).get(name);

/** How many devices there are of each resource, by its name, and in `waiting` how many workers wait for any of it. */
export function totalsOf(fleet) {
  const resources = new Map(), waiting = new Map();
  for (const host of fleet.hosts.values()) {
    for (const [resource, totals] of host.totals) mapped(resources, resource).addAll(totals);
    for (const { amounts } of host.waiting)
      for (const resource of Object.keys(amounts ?? {})) waiting.set(resource, (waiting.get(resource) ?? 0) + 1);
  }
  for (const resource of waiting.keys()) mapped(resources, resource);
  for (const [resource, totals] of resources) totals.waiting = waiting.get(resource) ?? 0;
  return new Map([...resources].sort(([a], [b]) => (a < b ? -1 : 1)));
}

/** A host with what follows from it: `counts` of devices by state, `totals` by resource, `holding` (how many workers
 * hold devices), `users` (and how many wait, too), `planned` (no manager serves it, as an operator has planned),
 * `weight` (how bad it is) and `text` to find it by. */
function completed({ devices, ...host }) {
  const placed = withKept(devices, byName).map(device => ({ device, place: placeOf(device) }));
  return counted({ ...host, devices: placed.sort(byPlace).map(({ device }) => device) });
}

/** A device's place: by resource, and in the machine by index, or else by PCI address. */
function placeOf({ resource, id, properties = {} }) {
  const { index, "pci.bus_id": address = "\u{10ffff}" } = properties;
  return [resource, /^\d{1,15}$/.test(index) ? Number(index) : Infinity, address, id];
}

function byPlace(a, b) {
  const at = a.place.findIndex((part, n) => part !== b.place[n]);
  return at < 0 ? 0 : a.place[at] < b.place[at] ? -1 : 1;
}

function counted(host) {
  const counts = {}, totals = new Map(), holders = new Set(), text = [host.name];
  let most = 0; // holders of one device, of whom it may not name all
  for (const device of host.devices) {
    const state = stateOf(device, host);
    counts[state] = (counts[state] ?? 0) + 1;
    const model = device.properties?.model;
    mapped(totals, device.resource).add(state, 1, model);
    text.push(...namesOf(device), ...(model ? [model] : []));
    most = Math.max(most, device.holder_count ?? 0);
    for (const holder of device.holders) {
      holders.add(holder.worker);
      text.push(labelsOf(holder));
    }
  }
  for (const [resource, { left_out }] of Object.entries(host.resources ?? {}))
    for (const [state, number] of left_out ? leftOut(host, resource, left_out) : []) {
      counts[state] = (counts[state] ?? 0) + number;
      mapped(totals, resource).add(state, number);
    }
  for (const waiter of host.waiting) text.push(waiter.worker, labelsOf(waiter));
  const holding = Math.max(holders.size, most), users = holding + host.waiting.length;
  const failing = Object.values(host.resources ?? {}).filter(isFailing).length;
  const planned = !host.managed && hostOrder(host) !== undefined;
  const unserved = host.managed || planned ? 0 : host.missed ? 1e6 : 1e3;
  const { unhealthy = 0, unknown = 0 } = counts;
  const weight = unserved + failing * 1e4 + unhealthy * 100 + unknown;
  const found = [...text, ...holders].join("\n").toLowerCase();
  return { ...host, counts, totals, holding, users, planned, weight, failing, text: found };
}

/** By state, the devices that a host's record counts and does not list, and that nobody holds. How many of the cordoned
 * ones are healthy is not known: all, so that no more are free than can be had. */
function leftOut(host, resource, { total, healthy, cordoned }) {
  const held = host.devices.filter(device => device.resource === resource && !device.listed);
  const rest = Math.max(0, total - held.length);
  const out = Math.min(rest, Math.max(0, cordoned - held.filter(device => ordersOf(device, host).length).length));
  const well = Math.max(0, healthy - held.filter(device => device.health === "healthy").length);
  const free = host.managed ? Math.min(rest - out, Math.max(0, well - out)) : 0;
  return [["cordoned", out], ["free", free], ["unknown", rest - out - free]].filter(([, number]) => number);
}

const nameless = name => ({
  name, managed: false, life: "unknown", lifeAt: null, process: null, unanswered: null, missed: false, manager: null,
  since: null, resources: null, devices: [], waiting: [], orders: [],
});

const isOf = (holder, worker, incarnation) => holder.worker === worker && holder.incarnation === incarnation;

/** A waiting worker, from an item of the queue's page or from a record. */
const waiterOf = record => ({
  host: record.host, worker: record.worker, incarnation: record.incarnation, since: record.since,
  position: record.queue_position, amounts: record.amounts ?? record.request.amounts, reason: record.reason,
  code: record.reason_code, until: record.wait_until, labels: record.labels ?? record.request?.labels ?? {},
});

const inOrder = waiting => waiting.sort((a, b) => (a.position ?? Infinity) - (b.position ?? Infinity));

export class Fleet {
  constructor() {
    this.hosts = new Map();
  }

  /** Fill it from the items of pages. */
  restore(hosts, devices, queue) {
    const parts = new Map();
    for (const item of hosts) {
      const { host: name, life_at: lifeAt, ...same } = item;
      const { managed, life, process, unanswered, missed, manager, since, resources, orders } = same;
      const state = { managed, life, lifeAt, process, unanswered, missed };
      parts.set(name, { ...nameless(name), ...state, manager, since, resources, orders });
    }
    const part = name => parts.get(name) ?? parts.set(name, nameless(name)).get(name);
    for (const device of devices) part(device.host).devices.push(device);
    for (const item of queue) part(item.host).waiting.push(waiterOf(item));
    for (const [name, host] of parts) this.hosts.set(name, completed(host));
  }

  /** Replace the devices of a host by those of a page. */
  replaceDevices(name, devices) {
    const host = this.hosts.get(name);
    if (host) this.#put({ ...host, devices });
  }

  /** Whether a host has a device with more holders than it names: events alone do not keep their number current. */
  isCrowded(name) {
    return this.hosts.get(name)?.devices.some(device => device.holder_count > device.holders.length) ?? false;
  }

  /** Apply one event. */
  apply({ kind, data }) {
    if (kind === "allocation") this.#putAllocation(data.key, data.record);
    else if (kind === "manager") this.#putLife(data);
    else if (kind === "host") this.#putHost(data.key.slice("@host/".length), data.record);
    else if (kind === "cordon") this.#putOrder(data.key, data.record);
  }

  #putOrder(key, record) {
    const [, name, id] = key.split("/"), host = this.hosts.get(name) ?? nameless(name);
    const orders = host.orders.filter(order => order.id !== id);
    const { author, reason, since, until = null, resource = null, device = null } = record ?? {};
    if (record) orders.push({ id, author, reason, since, until, resource, device });
    if (record || this.hosts.has(name)) this.#put({ ...host, orders: orders.sort(byAge) });
  }

  #putAllocation(key, record) {
    const [name, worker, incarnation] = key.split("/");
    const host = this.hosts.get(name) ?? nameless(name);
    const waiting = host.waiting.filter(waiter => !isOf(waiter, worker, incarnation));
    if (record?.state === "pending") inOrder((waiting.push(waiterOf(record)), waiting));
    this.#put({ ...host, waiting, devices: devicesAfter(host, worker, incarnation, record) });
  }

  #putLife({ host: name, life, life_at: lifeAt, process, unanswered, missed }) {
    const host = this.hosts.get(name);
    const managed = host?.manager !== null && !UNSERVED.has(life);
    if (host) this.#put({ ...host, life, lifeAt, process, unanswered, missed, managed });
  }

  #putHost(name, record) {
    const host = this.hosts.get(name) ?? nameless(name);
    const all = namesIn(Object.values(record?.resources ?? {})), devices = [], resources = {};
    const known = byName(host.devices), listedNames = new Set();
    for (const [resource, inventory] of Object.entries(record?.resources ?? {})) {
      const { state, reason, amount, sharing, replicas = 1, devices: listed = [] } = inventory;
      const wholes = wholesIn(inventory);
      const total = inventory.total ?? listed.length;
      const left_out = countedOnly(inventory, listed);
      resources[resource] = { state, reason, amount, sharing, total, healthy: inventory.healthy, left_out };
      for (const { id, health = "healthy", reason: why, properties, cordon, used_by = null } of listed) {
        const named = [...(all.get(id) ?? [id])], former = named.flatMap(each => known.get(each) ?? []);
        const names = new Set([...named, ...former.filter(each => each.holders.length).flatMap(namesOf)]);
        const device = { host: name, resource, id, health, reason: why ?? null, sharing, state: null, properties };
        const part_of = wholes.get(id) ?? null;
        const aliases = others(names, id);
        devices.push({ ...device, part_of, replicas, cordon, used_by, aliases, ...holdersIn(former), listed: true });
        for (const each of names) listedNames.add(each);
      }
    }
    const short = shortLists(resources, devices);
    const isGone = device => device.holders.length && !namesOf(device).some(each => listedNames.has(each));
    for (const device of oneEach(host.devices.filter(isGone))) devices.push(unlisted(device, short));
    const { manager = null, since = null } = record ?? {};
    const { life, lifeAt, process = null } = lifeAfter(host, manager);
    const managed = manager !== null && !UNSERVED.has(life);
    const next = { ...host, managed, life, lifeAt, process, manager, since, devices, resources: record && resources };
    if (record === null && !devices.length && !host.waiting.length && !host.orders.length) this.hosts.delete(name);
    else this.#put(next);
  }

  #put(host) {
    this.hosts.set(host.name, completed(host));
  }
}

/** What is known of a manager's life once its host's record has come. Of another instance nothing is known yet. */
function lifeAfter(host, manager) {
  if (manager?.stopped_at) return { life: "stopped", lifeAt: manager.stopped_at };
  const isSame = manager !== null && manager.instance === host.manager?.instance && host.life !== "stopped";
  return isSame ? host : { life: "unknown", lifeAt: null };
}

/** The devices that a host's record counts and does not list; null: it lists all. */
function countedOnly({ total, healthy = 0, cordoned = 0 }, listed) {
  const rest = (total ?? 0) - listed.length, within = number => Math.min(rest, Math.max(0, number));
  if (rest <= 0) return null;
  const well = listed.filter(device => (device.health ?? "healthy") === "healthy").length;
  const out = listed.filter(device => device.cordon).length;
  return { total: rest, healthy: within(healthy - well), cordoned: within(cordoned - out) };
}

/** The resources of which a host's record has no room for all devices. */
function shortLists(resources, devices) {
  const listed = {};
  for (const device of devices) if (device.listed) listed[device.resource] = (listed[device.resource] ?? 0) + 1;
  return new Set(Object.keys(resources ?? {}).filter(name => resources[name].total > (listed[name] ?? 0)));
}

/** A held device that its host's record does not list. If there is no room, its holder's record has its health. */
function unlisted({ used_by, ...device }, short) {
  if (!short.has(device.resource)) return { ...device, listed: false, health: "unknown", reason: UNREPORTED };
  const { health = "healthy", "health.reason": reason = null } = device.holders.at(-1).info ?? device.properties;
  return { ...device, listed: false, health, reason };
}

/** The names of each device that has several, by each of them, as a host's record has them: groups with a name in
 * common are one device. */
function namesIn(inventories) {
  const all = new Map();
  for (const group of inventories.flatMap(inventory => inventory.names ?? [])) {
    const names = new Set(group.flatMap(name => [...(all.get(name) ?? [name])]));
    for (const name of names) all.set(name, names);
  }
  return all;
}

/** Devices by each of their names. */
function byName(devices) {
  const found = new Map();
  for (const device of devices)
    for (const name of namesOf(device)) found.set(name, [...(found.get(name) ?? []), device]);
  return found;
}

/** The holders in all lines of one device: each once, who has it alone first. */
function holdersIn(lines) {
  const key = holder => `${holder.worker}/${holder.incarnation}`;
  const holders = new Map(lines.flatMap(line => line.holders).map(holder => [key(holder), holder]));
  const holder_count = Math.max(holders.size, ...lines.map(line => line.holder_count ?? 0));
  return { holders: inPlace([...holders.values()]), holder_count };
}

const inPlace = holders => holders.sort((a, b) => a.shared - b.shared).slice(0, MOST_HOLDERS);

/** Of lines that are one device, one. */
function oneEach(lines) {
  const seen = new Set(), found = [];
  for (const line of lines) {
    if (!namesOf(line).some(name => seen.has(name))) found.push(line);
    for (const name of namesOf(line)) seen.add(name);
  }
  return found;
}

/** A host's devices after a run's record has changed (null: it was deleted). */
function devicesAfter(host, worker, incarnation, record) {
  const held = heldBy(record), devices = [], short = shortLists(host.resources, host.devices), known = new Set();
  const holder = ({ properties: info, shared }) => {
    const { state, token, since, delayed_by, request } = record;
    return { worker, incarnation, state, token, since, delayed_by, shared, labels: request?.labels ?? {}, info };
  };
  for (const device of host.devices) {
    const own = namesOf(device).flatMap(name => held.get(name) ?? []).sort((a, b) => a.shared - b.shared);
    for (const each of own) for (const name of each.names) known.add(name);
    const aliases = others([...namesOf(device), ...own.flatMap(each => each.names)], device.id);
    const next = withHolder({ ...device, aliases }, worker, incarnation, own.length ? holder(own[0]) : null);
    if (own.length && !device.listed) devices.push(unlisted(next, short));
    else if (next.holders.length || device.listed) devices.push(next);
  }
  for (const [id, { resource, properties, shared, names }] of held) {
    if (known.has(id)) continue;
    const aliases = others(names, properties.id);
    const device = { host: host.name, resource, id: properties.id, aliases, sharing: shared ? "shared" : "exclusive" };
    const holders = [holder(held.get(id))];
    devices.push(unlisted({ ...device, state: null, properties, holders, holder_count: 1 }, short));
    for (const name of names) known.add(name);
  }
  return devices;
}

/** A device after one run holds it (`next`), or does not (null). A device names only some of many holders: whoever it
 * does not name may be one of the others. */
function withHolder(device, worker, incarnation, next) {
  const at = device.holders.findIndex(each => isOf(each, worker, incarnation));
  if (at < 0 && !next) return device;
  const holders = [...device.holders];
  if (at < 0) holders.push(next);
  else holders.splice(at, 1, ...(next ? [next] : []));
  const unnamed = (device.holder_count ?? 0) - device.holders.length;
  return { ...device, holders: inPlace(holders), holder_count: holders.length + unnamed };
}

/** The devices that a record's run holds, by each of their names. */
function heldBy(record) {
  const held = new Map();
  if (!HOLDING.has(record?.state)) return held;
  for (const [resource, infos] of Object.entries(record.resources ?? {}))
    for (const properties of infos.filter(each => each.id)) {
      const names = [...new Set([properties.id, ...(record.aliases?.[properties.id] ?? [])])];
      const shared = (record.shared ?? []).includes(resource);
      for (const name of names)
        if (held.get(name)?.shared ?? true) held.set(name, { resource, properties, shared, names });
    }
  return held;
}
