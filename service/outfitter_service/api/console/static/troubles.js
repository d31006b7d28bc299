// What needs a person, worst first, and who waits: one entry for all that have one cause.
import { isFailing, isMissed, stateOf } from "./fleet.js";
import { addressOf, amounts, code, count, some } from "./words.js";

const MINUTE_MS = 60 * 1000, RECENT_MS = 60 * MINUTE_MS;
const UNANSWERED_MS = 10 * MINUTE_MS, BESIDE_FREE_MS = 15 * MINUTE_MS; // as for the alerts on workers that wait
const HEALING = "granted when enough are healthy again"; // in the reason, if illness alone is in the way
const HELD_BACK = "held back: "; // how the reason of such a device begins

/** The troubles. Each has `urgent`, a `title`, a `text` that says what it means and what to do, `since` (milliseconds,
 * or null), and where to look: an `address`, or the state `only` of which the fleet has devices. */
export function troublesOf(fleet, feed, now) {
  const hosts = [...fleet.hosts.values()].sort((a, b) => b.weight - a.weight || (a.name < b.name ? -1 : 1));
  const found = [
    ...lentTwice(hosts),
    ...outage(feed),
    ...killed(hosts.filter(host => host.life === "dead" && host.process === null)),
    ...silent(hosts.filter(host => host.life === "dead" && host.process !== null)),
    ...withoutManager(hosts.filter(host => host.life !== "dead" && isMissed(host))),
    ...failingDrivers(hosts),
    ...unhealthy(hosts.filter(host => host.counts.unhealthy)),
    ...infeasible(hosts),
    ...unanswered(hosts.filter(host => host.managed), now),
    ...besideFree(hosts, now),
    ...notFree(hosts),
    ...heldBack(hosts),
    ...unheard(hosts),
    ...failed(fleet, now),
    ...refused(fleet, now),
  ];
  return found.map(trouble => ({ since: null, ...trouble })).sort((a, b) => b.urgent - a.urgent);
}

const names = hosts => some(hosts.map(host => host.name));
const where = hosts => (hosts.length === 1 ? hosts[0].name : count(hosts.length, "host"));
const oldest = times => times.reduce((first, time) => Math.min(first, Date.parse(time)), Infinity);
const atFirst = hosts => ({ address: addressOf("host", hosts[0].name) });
const total = (hosts, of) => hosts.reduce((sum, host) => sum + of(host), 0);

function lentTwice(hosts) {
  const twice = new Map(); // one device may be in two resources
  for (const host of hosts)
    for (const device of host.devices.filter(each => each.holders.length > 1)) {
      const alone = device.holders.filter(holder => !holder.shared);
      if (alone.length > 1) twice.set(`${host.name}/${device.id}`, { device, alone });
    }
  if (!twice.size) return [];
  const [{ device, alone }] = twice.values();
  return [{
    urgent: true,
    title: `${count(twice.size, "device")} ${twice.size === 1 ? "is" : "are"} lent twice`,
    text: `${alone.map(holder => holder.worker).join(" and ")} have ${device.id} on ${device.host}. Stop one of them, `
      + `keep the topics, and report what ${code("outfitter verify")} says.`,
    since: Math.max(...alone.map(holder => Date.parse(holder.since))),
    address: addressOf("device", device.host, device.id),
  }];
}

function outage({ outage: reason }) {
  if (!reason) return [];
  const text = `${reason}. Workers keep what they have. Look after the brokers; the picture follows by itself.`;
  return [{ urgent: true, title: "The API cannot read the bus", text }];
}

function killed(hosts) {
  if (!hosts.length) return [];
  const heard = hosts.map(host => host.lifeAt).filter(Boolean);
  return [{
    urgent: true,
    title: `The manager of ${where(hosts)} was killed, or hangs`,
    text: `${affected(hosts)}Nobody answers before ${code("outfitter serve")} runs again`
      + `${hosts.length === 1 ? "" : `: ${names(hosts)}`}.`,
    since: heard.length ? oldest(heard) : null,
    ...atFirst(hosts),
  }];
}

function silent(hosts) {
  if (!hosts.length) return [];
  const heard = hosts.map(host => host.lifeAt).filter(Boolean);
  const processes = hosts.map(({ name, process }) => (process ? `process ${process} for ${name}` : name));
  return [{
    urgent: true,
    title: `The manager of ${where(hosts)} lives, but was not heard`,
    text: `${affected(hosts)}Nobody answers before it writes again. See its log, and whether it is stopped or on `
      + `another bus: ${some(processes)}.`,
    since: heard.length ? oldest(heard) : null,
    ...atFirst(hosts),
  }];
}

function withoutManager(hosts) {
  if (!hosts.length) return [];
  const stopped = hosts.map(host => host.lifeAt).filter(Boolean);
  return [{
    urgent: true,
    title: `${where(hosts)} ${hosts.length === 1 ? "has" : "have"} no manager`,
    text: `${affected(hosts)}Nobody answers before ${code("outfitter serve")} runs again`
      + `${hosts.length === 1 ? "" : `: ${names(hosts)}`}.`,
    since: stopped.length ? oldest(stopped) : null,
    ...atFirst(hosts),
  }];
}

/** Who feels that nobody answers on these hosts, as a sentence before others; nothing if nobody does. */
function affected(hosts) {
  const holders = total(hosts, host => host.holding), waiters = total(hosts, host => host.waiting.length);
  const messages = total(hosts, host => host.unanswered ?? 0);
  const parts = [
    holders ? `${count(holders, "worker")} there ${holders === 1 ? "keeps" : "keep"} devices` : "",
    waiters ? `${count(waiters, "worker")} ${waiters === 1 ? "waits" : "wait"}` : "",
    messages ? `${count(messages, "message")} ${messages === 1 ? "lies" : "lie"} unanswered` : "",
  ].filter(Boolean);
  return parts.length ? `${parts.join(", and ")}. ` : "";
}

const FAILURES = {
  "driver-failed": {
    title: name => `The driver of ${name} fails`,
    remedy: `The manager tries again by itself. ${code("outfitter doctor")} on the host says what it lacks.`,
  },
  misconfigured: {
    title: name => `${name} is misconfigured`,
    remedy: `Correct the host's configuration: ${code("outfitter config check")} says where.`,
  },
  "no-driver": { title: name => `${name} has no driver`, remedy: "Name its driver in the host's configuration." },
};

function failingDrivers(hosts) {
  const groups = new Map();
  for (const host of hosts.filter(each => each.managed && each.failing))
    for (const [name, resource] of Object.entries(host.resources).filter(([, each]) => isFailing(each))) {
      const key = `${resource.state}/${name}`;
      const group = groups.get(key) ?? groups.set(key, { name, resource, hosts: [] }).get(key);
      group.hosts.push(host);
    }
  return [...groups.values()].map(({ name, resource, hosts: affected }) => ({
    urgent: false,
    title: `${FAILURES[resource.state].title(name)} on ${where(affected)}`,
    text: `Nobody gets any ${name} there${because(resource.reason)}. ${FAILURES[resource.state].remedy}`,
    ...atFirst(affected),
  }));
}

const bare = reason => reason.replace(/\.$/, "");
const because = reason => (reason ? `: ${bare(reason)}` : "");
const sentence = reason => (reason ? `${bare(reason)}. ` : "");

function unhealthy(hosts) {
  if (!hosts.length) return [];
  const devices = total(hosts, host => host.counts.unhealthy);
  const worst = hosts.reduce((a, b) => (b.counts.unhealthy > a.counts.unhealthy ? b : a));
  const first = worst.devices.find(device => device.health === "unhealthy");
  const isHeld = device => device.health === "unhealthy" && device.holders.length;
  const held = total(hosts, host => host.devices.filter(isHeld).length);
  const holders = devices === 1 ? " A worker still holds it." : ` Workers still hold ${held} of them.`;
  return [{
    urgent: false,
    title: `${count(devices, "device")} on ${where(hosts)} ${devices === 1 ? "is" : "are"} unhealthy`,
    text: `${hosts.length === 1 ? "Its driver says" : `Most are on ${worst.name}`}${because(first.reason)}. `
      + `Nobody gets ${devices === 1 ? "it" : "one"} before its driver reports it healthy again.${held ? holders : ""} `
      + "Look at the device, or replace it.",
    only: "unhealthy",
    ...(hosts.length === 1 ? atFirst(hosts) : {}),
  }];
}

/** Waiters in vain: for devices that are ill, or for more than there are. */
function infeasible(hosts) {
  const waiters = hosts.flatMap(host => host.waiting.filter(waiter => waiter.code === "infeasible"));
  const isHealing = waiter => waiter.reason?.includes(HEALING) ?? false;
  const trouble = (found, what, text) => (!found.length ? [] : [{
    urgent: false,
    title: `${count(found.length, "worker")} ${found.length === 1 ? "wants" : "want"} ${what}`,
    text: text(found[0].reason),
    since: oldest(found.map(waiter => waiter.since)),
    address: addressOf("worker", found[0].host, found[0].worker),
  }]);
  return [
    ...trouble(waiters.filter(isHealing), "devices that are ill",
      reason => `${sentence(reason)}Mend or replace the ill ones.`),
    ...trouble(waiters.filter(waiter => !isHealing(waiter)), "more than the host has",
      reason => `That never comes by waiting${because(reason)}. Register with less, or add devices.`),
  ];
}

function unanswered(hosts, now) {
  const waiters = hosts.flatMap(host => host.waiting.filter(waiter => waiter.code === "not-reported").map(waiter =>
    ({ ...waiter, begin: Math.max(Date.parse(waiter.since), Date.parse(host.manager?.since ?? waiter.since)) })));
  const late = waiters.filter(waiter => now - waiter.begin >= UNANSWERED_MS).sort((a, b) => a.begin - b.begin);
  if (!late.length) return [];
  const [first] = late;
  return [{
    urgent: false,
    title: `${count(late.length, "worker")} ${late.length === 1 ? "waits" : "wait"} for a driver's answer`,
    text: `${first.worker} on ${first.host}: ${sentence(first.reason)}`
      + `${code("outfitter doctor")} on the host says what the driver lacks.`,
    since: first.begin,
    address: addressOf("worker", first.host, first.worker),
  }];
}

function besideFree(hosts, now) {
  const late = hosts.flatMap(host => {
    const isLate = waiter => waiter.code === "busy" && now - Date.parse(waiter.since) >= BESIDE_FREE_MS;
    const waiters = host.waiting.filter(isLate);
    if (!waiters.length || !host.counts.free) return [];
    const free = new Set(host.devices.filter(device => stateOf(device, host) === "free").map(each => each.resource));
    return waiters.filter(waiter => Object.keys(waiter.amounts).some(name => free.has(name)));
  });
  if (!late.length) return [];
  const first = late.reduce((a, b) => (Date.parse(b.since) < Date.parse(a.since) ? b : a));
  return [{
    urgent: false,
    title: `${count(late.length, "worker")} ${late.length === 1 ? "waits" : "wait"} although devices are free`,
    text: `${first.worker} on ${first.host}: ${sentence(first.reason)}`
      + `A large request may keep them for itself: ${code("outfitter explain")} says more.`,
    since: Date.parse(first.since),
    address: addressOf("worker", first.host, first.worker),
  }];
}

function notFree(hosts) {
  const delayed = hosts.flatMap(host => host.devices.flatMap(device =>
    device.holders.filter(holder => holder.delayed_by).map(holder => ({ device, holder }))));
  if (!delayed.length) return [];
  const [{ device, holder }] = delayed;
  return [{
    urgent: false,
    title: `${count(delayed.length, "device")} ${delayed.length === 1 ? "is" : "are"} still in use after release`,
    text: `${holder.worker} on ${device.host}: ${sentence(holder.delayed_by)}It is lent again when nobody uses it.`,
    since: oldest(delayed.map(each => each.holder.since)),
    address: addressOf("device", device.host, device.id),
  }];
}

const isHeldBack = device => device.health === "unknown" && device.reason?.startsWith(HELD_BACK);

/** The devices for which `isMeant`, of managed hosts with devices of unknown health, and these hosts. */
function ofUnknownHealth(hosts, isMeant) {
  const affected = hosts.filter(host => host.managed && host.counts.unknown && host.devices.some(isMeant));
  return [affected.flatMap(host => host.devices.filter(isMeant)), affected];
}

function heldBack(hosts) {
  const [devices, affected] = ofUnknownHealth(hosts, isHeldBack);
  if (!devices.length) return [];
  const [first] = devices;
  return [{
    urgent: false,
    title: `${count(devices.length, "device")} on ${where(affected)} ${devices.length === 1 ? "is" : "are"} held back`,
    text: `${first.id} is ${sentence(first.reason)}End that worker, or let the driver report the old id as an alias.`,
    only: "unknown",
    ...(affected.length === 1 ? atFirst(affected) : {}),
  }];
}

function unheard(hosts) {
  const [devices, affected] = ofUnknownHealth(hosts, device => device.health === "unknown" && !isHeldBack(device));
  if (!devices.length) return [];
  const one = devices.length === 1;
  return [{
    urgent: false,
    title: `The health of ${count(devices.length, "device")} on ${where(affected)} is unknown`,
    text: `Nobody gets ${one ? "it" : "one"} before its driver reports it healthy${because(devices[0].reason)}.`,
    only: "unknown",
    ...(affected.length === 1 ? atFirst(affected) : {}),
  }];
}

function failed(fleet, now) {
  const recent = [...fleet.failed.values()].filter(worker => now - Date.parse(worker.since) < RECENT_MS);
  if (!recent.length) return [];
  const last = recent.reduce((a, b) => (Date.parse(a.since) < Date.parse(b.since) ? b : a));
  return [{
    urgent: false,
    title: `${count(recent.length, "worker")} failed in the last hour`,
    text: `The last was ${last.worker} on ${last.host}: ${sentence(last.reason)}`,
    since: Date.parse(last.since),
    address: addressOf("worker", last.host, last.worker),
  }];
}

function refused(fleet, now) {
  const recent = fleet.letters.filter(letter => now - Date.parse(letter.at) < RECENT_MS);
  if (!recent.length) return [];
  const last = recent.at(-1);
  return [{
    urgent: false,
    title: `${count(recent.length, "message")} ${recent.length === 1 ? "was" : "were"} refused in the last hour`,
    text: `The last: ${sentence(last.reason)}${code("outfitter dead-letters")} shows them whole.`,
    since: Date.parse(last.at),
  }];
}

/** Who waits, by reason and wish, the longest first: the waiters of each group, the longest first, and why. */
export function waitingGroups(fleet) {
  const groups = new Map();
  for (const host of fleet.hosts.values())
    for (const waiter of host.waiting) {
      const key = `${waiter.code}\n${amounts(waiter.amounts)}`;
      const group = groups.get(key) ?? groups.set(key, { key, waiters: [] }).get(key);
      group.waiters.push(waiter);
    }
  const inOrder = (a, b) => Date.parse(a.since) - Date.parse(b.since);
  for (const group of groups.values()) {
    group.waiters.sort(inOrder);
    const reasons = new Set(group.waiters.map(waiter => waiter.reason));
    const [first] = group.waiters;
    group.reason = `${first.reason ?? "not decided yet"}${reasons.size > 1 ? ", and the like" : ""}`;
  }
  return [...groups.values()].sort((a, b) => inOrder(a.waiters[0], b.waiters[0]));
}
