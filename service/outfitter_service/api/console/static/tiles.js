// The fleet: a tile a host, a cell a device, trouble first.
import { html, nothing } from "./vendor/lit-html.js";
import { guard } from "./vendor/directives/guard.js";
import { repeat } from "./vendor/directives/repeat.js";
import { STATES, hostOrder, orderWords, ordersOf, stateOf, totalsOf } from "./fleet.js";
import { addressOf, cell, count, number } from "./words.js";

const MOST_CELLS = 64; // of one resource

/** The totals of what the view shows alone, a resource or one model of it; undefined: there is none. */
const partOf = (totals, { resource, model }) =>
  (model === null ? totals.get(resource) : totals.get(resource)?.models.get(model));

/** A host's devices by state: all, or those that the view shows alone. */
const countsIn = (host, view) => (view.resource === null ? host.counts : partOf(host.totals, view)?.counts ?? {});

/** The hosts that the view's filter and search leave, in its order. */
export function shownHosts(fleet, view) {
  const text = view.find.trim().toLowerCase();
  const hasPart = host => view.resource === null || partOf(host.totals, view) !== undefined;
  const has = host => hasPart(host) && (!view.only || countsIn(host, view)[view.only]);
  const isShown = host => has(host) && (!text || host.text.includes(text));
  const byName = (a, b) => (a.name < b.name ? -1 : 1);
  const byTrouble = (a, b) => b.weight - a.weight || byName(a, b);
  return [...fleet.hosts.values()].filter(isShown).sort(view.sort === "name" ? byName : byTrouble);
}

/** Devices by state: all, or those that the view shows alone. */
function countsOf(totals, view) {
  if (view.resource !== null) return partOf(totals, view).counts;
  const counts = Object.fromEntries(STATES.map(state => [state, 0]));
  for (const of of totals.values()) for (const state of STATES) counts[state] += of.counts[state];
  return counts;
}

const UNSERVED = { dead: "no manager (killed, or hangs)", stopped: "no manager (stopped)" };
const unserved = host => (host.planned ? `no manager, as planned: ${orderWords(hostOrder(host))}`
  : host.process === null ? UNSERVED[host.life] ?? "no manager" : "its manager is not heard");

/** What a tile says to those who do not see it: its name first. */
function labelOf(host) {
  const words = counts => STATES.filter(state => counts[state]).map(state => `${counts[state]} ${state}`).join(", ");
  const isOne = host.totals.size === 1;
  const parts = [...host.totals].map(([resource, { counts }]) => `${isOne ? "" : `${resource} `}${words(counts)}`);
  if (host.failing) parts.unshift(`${count(host.failing, "resource")} failing`);
  if (!host.managed) parts.unshift(unserved(host));
  if (host.waiting.length) parts.push(`${host.waiting.length} waiting`);
  return `${host.name}: ${parts.join(", ") || "no devices"}`;
}

/** The resources of which a host has devices, also those for which its record has no room. */
function resourcesOf(host) {
  const counted = Object.entries(host.resources ?? {}).filter(([, { total }]) => total).map(([resource]) => resource);
  return [...new Set([...host.totals.keys(), ...counted])].sort();
}

/** The cells of one resource, or of one model of it. Its name is there where others are beside it, so that a full one
 * looks full. */
function cellsOf(host, resource, model, isAlone) {
  const isIn = device => device.resource === resource && (model === null || device.properties?.model === model);
  const devices = host.devices.filter(isIn);
  const cells = devices.map(device => ({ state: stateOf(device, host), device }));
  if (cells.length > MOST_CELLS) cells.sort((a, b) => STATES.indexOf(a.state) - STATES.indexOf(b.state));
  const total = model === null ? host.resources?.[resource]?.total ?? 0 : 0;
  const rest = Math.max(cells.length, total) - Math.min(cells.length, MOST_CELLS);
  const more = rest > 0 ? `+${number(rest)}` : nothing;
  return html`<span class="cells" data-more=${more}>${isAlone ? nothing : html`<span class="of">${resource}</span>`}${
    cells.slice(0, MOST_CELLS).map(({ state, device }) =>
      state === "cordoned" ? cordonedCell(device, host) : cell(state))}</span>`;
}

/** The pointer over the cell says who has taken the device out, and why. */
const cordonedCell = (device, host) =>
  html`<i class="cell cordoned" title=${ordersOf(device, host).map(orderWords).join("; ")}></i>`;

function tile(host, isOpen, hasTab, { resource: only, model }) {
  const resources = resourcesOf(host).filter(resource => only === null || resource === only);
  const isBad = host.managed ? host.counts.unhealthy || host.failing : host.missed && !host.planned;
  const kind = host.planned ? "planned" : `${host.managed ? "" : "unmanaged"} ${isBad ? "bad" : ""}`;
  return html`<a class="host ${kind}" href=${addressOf("host", host.name)} data-host=${host.name}
    aria-label=${labelOf(host)} aria-current=${isOpen ? "true" : nothing} tabindex=${hasTab ? 0 : -1}
    ><span class="name">${host.name}</span>${
      resources.map(resource => cellsOf(host, resource, model, resources.length === 1))}</a>`;
}

/** Who has the grid's one tab stop. */
const tabStop = (hosts, view) => (hosts.some(host => host.name === view.focus) ? view.focus : hosts[0]?.name);

function grid(hosts, view) {
  const stop = tabStop(hosts, view), open = view.subject?.kind === "host" ? view.subject.name : null;
  return html`<div class="grid" role="group" aria-label="Hosts: arrow keys move, Enter opens">
    ${repeat(hosts, host => host.name, host => {
      const isOpen = host.name === open, hasTab = host.name === stop;
      return guard([host, isOpen, hasTab, view.resource, view.model], () => tile(host, isOpen, hasTab, view));
    })}</div>`;
}

const legend = (counts, view) => html`<div class="legend" role="group" aria-label="Only hosts with devices that are">
  ${STATES.map(state => html`<button data-only=${state} aria-pressed=${view.only === state}
    >${cell(state)}${state} ${number(counts[state])}</button>`)}</div>`;

const freeOf = ({ total, counts }) => html`<b>${number(counts.free)} of ${number(total)} free</b>`;

/** The numbers of each resource, and of its models if there are several. A click shows one of them alone. */
const resourceButtons = (totals, view) => html`<div class="resources" role="group" aria-label="Only these devices">
  ${[...totals].map(([resource, of]) => html`<span><button data-resource=${resource}
    aria-pressed=${view.resource === resource && view.model === null}>${resource}: ${freeOf(of)}${
    of.waiting ? `, ${of.waiting === 1 ? "1 waits" : `${number(of.waiting)} wait`}` : nothing}${
    of.counts.cordoned ? `, ${number(of.counts.cordoned)} cordoned` : nothing}</button>${
    of.models.size < 2 ? nothing
      : [...of.models].map(([model, each]) => html`<button data-resource=${resource} data-model=${model}
        aria-pressed=${view.resource === resource && view.model === model}>${model}: ${
        freeOf(each)}</button>`)}</span>`)}
  </div>`;

const IN_BAR = ["held", "free", "cordoned", "stranger", "unknown", "unhealthy"];

const bar = counts => html`<div class="bar" aria-hidden="true">${IN_BAR.map(state =>
  counts[state] ? html`<i class=${state} .style=${`flex-grow: ${counts[state]}`}></i>` : nothing)}</div>`;

const tools = view => html`<div class="tools">
  <input id="find" type="search" placeholder="Host, device, worker or label ( / )"
    aria-label="Find by host, device, model, worker or label" autocomplete="off" spellcheck="false" .value=${view.find}>
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
  const totals = totalsOf(fleet);
  if (!partOf(totals, view)) view = { ...view, resource: null, model: null }; // it may have gone since it was chosen
  const counts = countsOf(totals, view), hosts = shownHosts(fleet, view);
  const isWhole = hosts.length === fleet.hosts.size;
  const part = isWhole ? nothing : `${number(hosts.length)} of ${count(fleet.hosts.size, "host")}`;
  return html`<section id="fleet" aria-labelledby="fleet-title" tabindex="-1">
    ${resourceButtons(totals, view)}${bar(counts)}
    <div class="fleet-head"><h2 id="fleet-title">Fleet</h2>
      ${legend(counts, view)}<span class="dim" role="status">${part}</span>${tools(view)}</div>
    ${hosts.length ? grid(hosts, view) : nothingFound(fleet, view)}</section>`;
}
