// The fleet: a tile a host, a cell a device, trouble first.
import { html, nothing } from "./vendor/lit-html.js";
import { guard } from "./vendor/directives/guard.js";
import { repeat } from "./vendor/directives/repeat.js";
import { STATES, stateOf } from "./fleet.js";
import { addressOf, cell, count, number } from "./words.js";

const MOST_CELLS = 64;

/** The hosts that the view's filter and search leave, in its order. */
export function shownHosts(fleet, view) {
  const text = view.find.trim().toLowerCase();
  const isShown = host => (!view.only || host.counts[view.only]) && (!text || host.text.includes(text));
  const byName = (a, b) => (a.name < b.name ? -1 : 1);
  const byTrouble = (a, b) => b.weight - a.weight || byName(a, b);
  return [...fleet.hosts.values()].filter(isShown).sort(view.sort === "name" ? byName : byTrouble);
}

/** Devices by state. */
export function countsOf(fleet) {
  const counts = Object.fromEntries(STATES.map(state => [state, 0]));
  for (const host of fleet.hosts.values()) for (const state in host.counts) counts[state] += host.counts[state];
  return counts;
}

const UNSERVED = { dead: "no manager (killed, or hangs)", stopped: "no manager (stopped)" };
const unserved = host => (host.process === null ? UNSERVED[host.life] ?? "no manager" : "its manager is not heard");

/** What a tile says to those who do not see it: its name first. */
function labelOf(host) {
  const parts = STATES.filter(state => host.counts[state]).map(state => `${host.counts[state]} ${state}`);
  if (host.failing) parts.unshift(`${count(host.failing, "resource")} failing`);
  if (!host.managed) parts.unshift(unserved(host));
  if (host.waiting.length) parts.push(`${host.waiting.length} waiting`);
  return `${host.name}: ${parts.join(", ") || "no devices"}`;
}

function cellsOf(host) {
  const states = host.devices.map(device => stateOf(device, host));
  if (states.length > MOST_CELLS) states.sort((a, b) => STATES.indexOf(a) - STATES.indexOf(b));
  const listed = Object.values(host.resources ?? {}).reduce((sum, resource) => sum + resource.total, 0);
  const rest = Math.max(states.length, listed) - Math.min(states.length, MOST_CELLS);
  const more = rest > 0 ? `+${number(rest)}` : nothing;
  return html`<span class="cells" data-more=${more}>${states.slice(0, MOST_CELLS).map(cell)}</span>`;
}

function tile(host, isOpen, hasTab) {
  const isBad = host.managed ? host.counts.unhealthy || host.failing : host.missed;
  const kind = `${host.managed ? "" : "unmanaged"} ${isBad ? "bad" : ""}`;
  return html`<a class="host ${kind}" href=${addressOf("host", host.name)} data-host=${host.name}
    aria-label=${labelOf(host)} aria-current=${isOpen ? "true" : nothing} tabindex=${hasTab ? 0 : -1}
    ><span class="name">${host.name}</span>${cellsOf(host)}</a>`;
}

/** Who has the grid's one tab stop. */
const tabStop = (hosts, view) => (hosts.some(host => host.name === view.focus) ? view.focus : hosts[0]?.name);

function grid(hosts, view) {
  const stop = tabStop(hosts, view), open = view.subject?.kind === "host" ? view.subject.name : null;
  return html`<div class="grid" role="group" aria-label="Hosts: arrow keys move, Enter opens">
    ${repeat(hosts, host => host.name, host => {
      const isOpen = host.name === open, hasTab = host.name === stop;
      return guard([host, isOpen, hasTab], () => tile(host, isOpen, hasTab));
    })}</div>`;
}

const legend = (counts, view) => html`<div class="legend" role="group" aria-label="Only hosts with devices that are">
  ${STATES.map(state => html`<button data-only=${state} aria-pressed=${view.only === state}
    >${cell(state)}${state} ${number(counts[state])}</button>`)}</div>`;

const IN_BAR = ["held", "free", "unknown", "unhealthy"];

const bar = counts => html`<div class="bar" aria-hidden="true">${IN_BAR.map(state =>
  counts[state] ? html`<i class=${state} .style=${`flex-grow: ${counts[state]}`}></i>` : nothing)}</div>`;

const tools = view => html`<div class="tools">
  <input id="find" type="search" placeholder="Host, device or worker ( / )"
    aria-label="Find a host, a device or a worker" autocomplete="off" spellcheck="false" .value=${view.find}>
  <select id="sort" aria-label="Order of the hosts"><option value="trouble">Trouble first</option
    ><option value="name">By name</option></select></div>`;

/** What stands in place of tiles where none is left. A worker that has ended is in no tile, but can be looked up. */
function nothingFound(fleet, view) {
  if (!fleet.hosts.size)
    return html`<p class="none">No host is known. Start a manager: <code>outfitter serve</code>.</p>`;
  const name = view.find.trim();
  if (!name) return html`<p class="none">No host has such a device.</p>`;
  return html`<p class="none">No host, device or live worker has “${name}” in its name.
    <a href=${addressOf("worker", "", name)}>Look up the worker ${name}</a>, which may have ended.</p>`;
}

export function fleetView(fleet, view) {
  const counts = countsOf(fleet), hosts = shownHosts(fleet, view);
  const isWhole = hosts.length === fleet.hosts.size;
  const part = isWhole ? nothing : `${number(hosts.length)} of ${count(fleet.hosts.size, "host")}`;
  return html`<section id="fleet" aria-labelledby="fleet-title" tabindex="-1">
    ${bar(counts)}
    <div class="fleet-head"><h2 id="fleet-title">Fleet</h2>
      ${legend(counts, view)}<span class="dim" role="status">${part}</span>${tools(view)}</div>
    ${hosts.length ? grid(hosts, view) : nothingFound(fleet, view)}</section>`;
}
