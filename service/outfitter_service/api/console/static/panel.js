// The panel at the side: one host, device or worker, its owner, its reasons and what happened there.
import { html, nothing } from "./vendor/lit-html.js";
import { hostOrder, isFailing, labelsOf, namesOf, orderWords, ordersOf, stateOf } from "./fleet.js";
import { aboutOf, amounts, cell, duration, linkTo, moment, number, oldness } from "./words.js";

const STEPS = 50;
const PAUSE_MS = 1_000;

/** The subject of an address such as `#host/gpu-1`; null: it has none. */
export function subjectOf(address) {
  const [kind, host, name] = address.replace(/^#/, "").split("/").map(decoded);
  if (kind === "host" && host) return { kind, host, name: host };
  if ((kind === "device" || kind === "worker") && name) return { kind, host, name };
  return null;
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

/** What the API says of the panel's subject beyond the fleet: steps of history and explanations. It is read again when
 * something happens on its host, at most once a second. */
export class Panel {
  constructor(api, changed) {
    this.api = api;
    this.changed = changed;
    this.show(null);
  }

  /** Show another subject; null: none. */
  show(subject) {
    this.subject = subject;
    this.steps = null;
    this.explanations = null;
    this.problem = null;
    if (subject) this.#read(subject);
  }

  /** Something happened on a host. */
  stepped(host) {
    if (!this.subject || this.isDue || (this.subject.host && this.subject.host !== host)) return;
    this.isDue = true;
    setTimeout(() => {
      this.isDue = false;
      if (this.subject) this.#read(this.subject);
    }, PAUSE_MS);
  }

  async #read(subject) {
    const { kind, host, name } = subject, ofHost = host ? { host } : {};
    const about = kind === "host" ? ofHost : { ...ofHost, [kind]: name };
    try {
      const [explanations, history] = await Promise.all([
        kind === "worker" ? this.#explain(name, ofHost) : [],
        this.api.page("history", { ...about, limit: STEPS }),
      ]);
      if (subject !== this.subject) return;
      Object.assign(this, { explanations, steps: history.body.items, problem: null });
    } catch (error) {
      if (subject !== this.subject) return;
      this.problem = error.message;
    }
    this.changed();
  }

  async #explain(worker, ofHost) {
    const path = `workers/${encodeURIComponent(worker)}/explanations`;
    return this.api.all(path, ofHost).catch(error => (error.status === 404 ? [] : Promise.reject(error)));
  }
}

const state = word => html`<span class="state">${cell(word)}${word}</span>`;

export const labelled = worker => (labelsOf(worker) ? html` <span class="dim">${labelsOf(worker)}</span>` : nothing);

const holdersOf = device => device.holders.map((holder, n) => html`${n ? ", " : nothing}${
  linkTo("worker", [device.host, holder.worker])}${holder.state === "allocated" ? nothing : ` (${holder.state})`}${
  labelled(holder)}${
  holder.delayed_by ? html`<br><span class="dim">${holder.delayed_by}</span>` : nothing}`).concat(
  device.holder_count > device.holders.length
    ? [html` and ${number(device.holder_count - device.holders.length)} more`] : []);

function managerView(host, now) {
  const { manager } = host;
  if (!manager) return html`<p>No manager has ever served this host.</p>`;
  if (host.planned)
    return html`<p>No manager, as planned${host.lifeAt ? `, for ${duration(now - Date.parse(host.lifeAt))}` : nothing}:
      ${orderWords(hostOrder(host))}.</p>`;
  if (host.life === "stopped")
    return html`<p>No manager: it was stopped ${duration(now - Date.parse(host.lifeAt))} ago. Start
      <code>outfitter serve</code> there.</p>`;
  if (host.life === "dead") {
    const heard = host.lifeAt ? `last heard ${duration(now - Date.parse(host.lifeAt))} ago` : "not heard for minutes";
    return host.process === null
      ? html`<p>Its manager was killed, or hangs: ${heard}. Start <code>outfitter serve</code> there.</p>`
      : html`<p>Its manager lives${host.process ? ` (process ${host.process})` : nothing}, but was ${heard}: see its
        log.</p>`;
  }
  return html`<p>Managed for ${duration(now - Date.parse(manager.since))} by Outfitter ${manager.version}.</p>`;
}

const resourceRow = ([name, resource]) => html`<tr><td>${name}</td>
  <td>${isFailing(resource) ? html`<b>${resource.state}</b>` : resource.state}</td>
  <td>${resource.healthy ?? "–"} of ${resource.total}${resource.sharing === "shared" ? ", shared" : nothing}</td>
  <td>${resource.reason ? resource.reason : "–"}</td></tr>`;

/** What tells people which device it is: its index, name, model, MIG profile and memory. */
function looks({ properties = {} }) {
  const { index, name, model, "mig.profile": profile, "memory.total_bytes": bytes } = properties;
  const memory = bytes && `${Math.floor((Number(bytes) * 10) / 2 ** 30) / 10} GiB`;
  const parts = [index && `${index}`, name, model, profile && `MIG ${profile}`, memory];
  return parts.filter(Boolean).join(" · ");
}

/** The process that uses a device as a stranger. */
const strangerOf = device => `${device.used_by}, which Outfitter did not lend to`;

const deviceRow = (device, host) => html`<tr><td>${state(stateOf(device, host))}</td>
  <td>${device.holders.length ? holdersOf(device) : "–"}</td>
  <td>${device.resource} ${looks(device)}<br>${linkTo("device", [host.name, device.id])}${
    device.reason ? html`<br><span class="dim">${device.reason}</span>` : nothing}${
    device.used_by ? html`<br><span class="dim">used by ${strangerOf(device)}</span>` : nothing}${
    ordersOf(device, host).map(order => html`<br><span class="dim">cordoned: ${orderWords(order)}</span>`)}</td></tr>`;

const table = (heads, rows, kind = "") => html`<table class=${kind}>
  <thead><tr>${heads.map(head => html`<th scope="col">${head}</th>`)}</tr></thead><tbody>${rows}</tbody></table>`;

function hostView(fleet, { name }, now) {
  const host = fleet.hosts.get(name);
  if (!host) return html`<p>No host has this name.</p>`;
  const resources = Object.entries(host.resources ?? {}).map(resourceRow), waiting = host.waiting.map(waiterRow);
  const devices = host.devices.map(device => deviceRow(device, host));
  return html`${managerView(host, now)}
    ${host.resources ? table(["Resource", "State", "Healthy", "Reason"], resources) : nothing}
    ${host.orders.length ? html`<h3>Orders in effect</h3>${
      table(["Cordoned", "Why, and by whom", "For"], host.orders.map(order => orderRow(order, now)))}` : nothing}
    <h3>Devices</h3>
    ${devices.length ? table(["State", "Held by", "Device"], devices, "devices")
      : html`<p class="none">None.</p>`}
    ${waiting.length ? html`<h3>Waiting here</h3>${table(["#", "Worker", "Wants", "Why"], waiting)}` : nothing}`;
}

const orderRow = (order, now) => html`<tr><td>${aboutOf(order)}</td><td>${orderWords(order)}</td>
  <td class="dim">${duration(now - Date.parse(order.since))}</td></tr>`;

const waiterRow = waiter => html`<tr><td class="dim">${waiter.position ?? "–"}</td>
  <td>${linkTo("worker", [waiter.host, waiter.worker])}${labelled(waiter)}</td><td>${amounts(waiter.amounts)}</td>
  <td>${waiter.reason ?? "–"}</td></tr>`;

const fact = (name, value) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`;

/** What a device is a part of. A GPU that is lent in parts only is no device itself. */
const wholeOf = ({ host, part_of }, named) => (named(part_of) ? linkTo("device", [host, part_of]) : part_of);

function deviceView(fleet, { host: hostName, name }) {
  const host = fleet.hosts.get(hostName), named = name => host?.devices.find(each => namesOf(each).includes(name));
  const device = named(name);
  if (!device) return html`<p>${linkTo("host", [hostName])} does not report this device now.</p>`;
  const properties = Object.entries(device.properties ?? {}).filter(([key]) => key !== "id");
  return html`<dl>${fact("Host", linkTo("host", [hostName]))}${fact("Resource", device.resource)}
    ${fact("State", state(stateOf(device, host)))}
    ${device.reason ? fact("Reason", device.reason) : nothing}
    ${device.used_by ? fact("Used by", strangerOf(device)) : nothing}
    ${ordersOf(device, host).map(order => fact("Cordoned", orderWords(order)))}
    ${device.part_of ? fact("Part of", wholeOf(device, named)) : nothing}
    ${fact("Held by", device.holders.length ? holdersOf(device)
      : device.kept ? "nobody, but somebody holds a part of it, or what it is a part of" : "nobody")}
    ${properties.map(([key, value]) => fact(key, value))}</dl>`;
}

function explanationView(found, now) {
  return html`<dl>${fact("Host", linkTo("host", [found.host]))}${fact("Run", found.incarnation)}
    ${fact("State", html`<b>${found.state}</b> for ${duration(now - Date.parse(found.since))}`)}
    ${found.reason ? fact("Reason", found.reason) : nothing}
    ${labelsOf(found) ? fact("Labels", labelsOf(found)) : nothing}
    ${fact("Wants", amounts(found.amounts))}
    ${found.queue_position === null ? nothing : fact("Place", `${found.queue_position} in the queue`)}
    ${found.wait_until ? fact("Gives up at", moment(found.wait_until, now)) : nothing}
    ${found.ahead.length ? fact("Before it", found.ahead.map((each, n) =>
      html`${n ? ", " : nothing}${linkTo("worker", [found.host, each.worker])} (${amounts(each.amounts)})`)) : nothing}
    ${found.warnings.map(warning => fact("Warning", warning))}</dl>
    ${held(found)}`;
}

function held(found) {
  const own = Object.entries(found.holds ?? {}).flatMap(([resource, ids]) => ids.map(id => ({ resource, id })));
  if (!own.length) return nothing;
  const link = device => linkTo("device", [found.host, device.id]);
  return html`<h3>Its devices</h3><ul>${own.map(device => html`<li>${device.resource}: ${link(device)}</li>`)}</ul>`;
}

function workerView({ name }, { explanations }, now) {
  if (explanations === null) return html`<p class="none">Reading…</p>`;
  if (!explanations.length) return html`<p>No worker ${name} is known: it never registered, or ended long ago.</p>`;
  return explanations.map(found => explanationView(found, now));
}

function stepRow({ record }, subject, now) {
  const { at, worker, host, event, explanation } = record;
  const who = worker && subject.kind !== "worker" ? html`${linkTo("worker", [host, worker])} ` : nothing;
  const change = record.to ? html`<b>${record.from ? `${record.from} → ` : nothing}${record.to}</b> ` : nothing;
  return html`<li>${moment(at, now)}<span>${who}${change}<span class="dim">${event}${explanation ? ": " : nothing}${
    explanation ?? ""}</span></span></li>`;
}

function historyView({ steps, problem }, subject, now) {
  if (problem) return html`<p role="alert">The history cannot be shown: ${problem}.</p>`;
  if (steps === null) return html`<p class="none">Reading…</p>`;
  if (!steps.length) return html`<p class="none">Nothing that the API remembers.</p>`;
  return html`<ol class="steps">${steps.map(step => stepRow(step, subject, now))}</ol>
    ${steps.length < STEPS ? nothing : html`<p class="none">These are the last ${STEPS}.</p>`}`;
}

export function panelView(feed, subject, panel, now) {
  const views = {
    host: () => hostView(feed.fleet, subject, now),
    device: () => deviceView(feed.fleet, subject),
    worker: () => workerView(subject, panel, now),
  };
  return html`<aside aria-labelledby="panel-title">
    <div class="panel-head">
      <h2 id="panel-title" tabindex="-1"><span class="dim">${subject.kind}</span> ${subject.name}</h2>
      <button id="close" aria-label="Close"><span aria-hidden="true">✕</span></button></div>
    ${feed.isLive ? nothing : html`<p class="live lost"><i></i>Not live: ${oldness(feed)}</p>`}
    ${views[subject.kind]()}
    <h3>What happened</h3>${historyView(panel, subject, now)}</aside>`;
}
