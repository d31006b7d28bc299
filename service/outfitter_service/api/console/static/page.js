// The page: first what needs a person, then who waits, then the fleet.
import { html, nothing } from "./vendor/lit-html.js";
import { labelled, panelView } from "./panel.js";
import { hostOrder, orderWords, totalsOf } from "./fleet.js";
import { fleetView } from "./tiles.js";
import { waitingGroups } from "./waiting.js";
import { aboutOf, addressOf, amounts, count, duration, linkTo, number, oldness, withCode } from "./words.js";

const MOST_GROUPS = 6;
const MOST_NAMES = 3;
const MOST_ORDERS = 6;

/** How things are, in one sentence. Without a live picture it is said in the past: a dead stream must not look calm. */
function sentence(troubles, isLive) {
  const urgent = troubles.filter(trouble => trouble.urgent).length;
  if (urgent) return `${count(urgent, "thing")} ${isLive ? (urgent === 1 ? "needs" : "need") : "needed"} you`;
  if (troubles.length) return isLive ? "Nothing urgent" : "Nothing was urgent";
  return isLive ? "All is well" : "All was well";
}

function summary(fleet) {
  const free = [...totalsOf(fleet)].slice(0, MOST_NAMES).map(([resource, { counts, total }]) =>
    `${number(counts.free)} of ${number(total)} ${resource} free`);
  const waiting = [...fleet.hosts.values()].reduce((sum, host) => sum + host.waiting.length, 0);
  const queue = waiting ? `${count(waiting, "worker")} ${waiting === 1 ? "waits" : "wait"}` : "nobody waits";
  return [count(fleet.hosts.size, "host"), ...free, queue].join(", ");
}

/** How old the picture is. Only the first words are announced: the seconds would be, one after the other. */
export function ageView(feed) {
  if (feed.isLive) return html`<span class="live" role="status"><i></i>live</span>`;
  if (!feed.fleet) return html`<span class="live lost" role="status"><i></i>no picture yet</span>`;
  return html`<span class="live lost"><i></i><span role="status">Not live</span>: ${oldness(feed)}</span>`;
}

function header(feed, view) {
  const { cluster } = feed.status, theme = view.isDark ? "Use light colours" : "Use dark colours";
  return html`<header><strong>Outfitter</strong><span class="cluster">${cluster ? `cluster ${cluster}` : nothing}</span>
    ${ageView(feed)}
    <button id="theme" aria-label=${theme}><span aria-hidden="true">◐</span></button></header>`;
}

/** Why the picture is not live. */
function lostNotice(feed) {
  if (feed.isLive || !feed.fleet || feed.phase === "token") return nothing;
  const reason = feed.outage && feed.phase === "live" ? "the API cannot read the bus" : feed.reason;
  return html`<p class="notice" role="alert"><b>This picture is old:</b> <span>${reason}.</span>
    <button id="retry">Try now</button></p>`;
}

/** Which devices the fleet shows alone, where a trouble names no place to look at first. */
const ONLY = { unhealthy: "unhealthy", "held-back": "unknown", unknown: "unknown", "used-by-stranger": "stranger" };

/** The address of the place that a trouble names. */
function placeOf({ host, device, worker }) {
  if (worker) return addressOf("worker", host, worker);
  if (device) return addressOf("device", host, device);
  return host && addressOf("host", host);
}

function trouble(it, now) {
  const title = html`<b>${it.title}</b>`, address = placeOf(it), only = ONLY[it.kind];
  return html`<li class=${it.urgent ? "urgent" : "look"}>
  <span class="mark" role="img" aria-label=${it.urgent ? "urgent" : "not urgent"}>${it.urgent ? "■" : "▲"}</span>
  ${address ? html`<a href=${address}>${title}</a>`
    : only ? html`<button class="link" data-only=${only}>${title}</button>` : title}
  <span class="since">${it.since ? duration(now - Date.parse(it.since)) : nothing}</span>
  <p>${it.text} ${withCode(it.remedy)}</p></li>`;
}

const troubleList = (troubles, now) => html`<section class="card" aria-labelledby="troubles-title">
  <h2 id="troubles-title">Needs attention</h2>
  ${troubles.length ? html`<ul class="troubles">${troubles.map(each => trouble(each, now))}</ul>`
    : html`<p class="none">Nothing does.</p>`}
</section>`;

/** What operators have taken out: hosts without a manager first, then the newest orders. None of it needs a person. */
function orderList(fleet, now) {
  const all = [...fleet.hosts.values()].flatMap(host => host.orders.map(order => ({
    host, order, isPlanned: host.planned && hostOrder(host) === order })));
  if (!all.length) return nothing;
  all.sort((a, b) => b.isPlanned - a.isPlanned || Date.parse(b.order.since) - Date.parse(a.order.since));
  const rest = all.length - MOST_ORDERS;
  return html`<section class="card orders" aria-labelledby="orders-title">
    <h2 id="orders-title">Cordoned by operators <span>${number(all.length)}</span></h2>
    <ul>${all.slice(0, MOST_ORDERS).map(({ host, order, isPlanned }) => html`<li>
      ${linkTo("host", [host.name])}: ${aboutOf(order)} <span class="dim">for ${
      duration(now - Date.parse(order.since))}</span>: ${orderWords(order)}${
      isPlanned ? html`; <b>no manager, as planned</b>` : nothing}</li>`)}</ul>
    ${rest > 0 ? html`<p class="none">And ${count(rest, "more order")}: <code>outfitter orders</code> lists them.</p>`
      : nothing}</section>`;
}

function waitingRow({ waiters, reason }, now) {
  const rest = waiters.length - MOST_NAMES;
  const names = waiters.slice(0, MOST_NAMES).map((waiter, n) => html`${n ? ", " : nothing}${
    linkTo("worker", [waiter.host, waiter.worker])} <span class="dim">on ${waiter.host}</span>${labelled(waiter)}`);
  return html`<tr><td>${names}${rest > 0 ? ` and ${number(rest)} more` : nothing}</td>
    <td>${amounts(waiters[0].amounts)}</td><td class="dim">${duration(now - Date.parse(waiters[0].since))}</td>
    <td class="why">${reason}</td></tr>`;
}

function waitingList(fleet, view, now) {
  const groups = waitingGroups(fleet), shown = view.allGroups ? groups : groups.slice(0, MOST_GROUPS);
  const waiters = groups.reduce((sum, group) => sum + group.waiters.length, 0), rest = groups.length - shown.length;
  const heads = ["Workers", "Want", "For", "Why"].map(head => html`<th scope="col">${head}</th>`);
  return html`<section class="card" aria-labelledby="waiting-title">
    <h2 id="waiting-title">Waiting <span>${waiters ? number(waiters) : nothing}</span></h2>
    ${waiters ? html`<table class="waiting"><thead><tr>${heads}</tr></thead>
      <tbody>${shown.map(group => waitingRow(group, now))}</tbody></table>` : html`<p class="none">Nobody waits.</p>`}
    ${rest ? html`<button id="all-groups">${count(rest, "more reason")}</button>` : nothing}
  </section>`;
}

const tokenForm = feed => html`<main class="alone"><h1>A token is needed</h1>
  <p>It is in the file that the API got as <code>--token-file</code> or <code>api-token-file</code>. This tab keeps it
    until it is closed.</p>
  <form id="token-form"><label for="token">Token</label>
    <input id="token" type="password" autocomplete="off" required><button>Show the fleet</button></form>
  ${feed.tokenWasWrong ? html`<p role="alert">The API refused that token.</p>` : nothing}</main>`;

const noPicture = feed => html`<main class="alone"><h1>Reading the fleet</h1>
  <p role="status">${feed.reason || "One moment."}</p></main>`;

export function pageView(feed, view, panel) {
  if (feed.phase === "token") return html`${header(feed, view)}${tokenForm(feed)}`;
  if (!feed.fleet) return html`${header(feed, view)}${noPicture(feed)}`;
  const { troubles, api: { now } } = feed;
  return html`<a class="skip" href="#fleet">To the fleet</a>
    ${header(feed, view)}${lostNotice(feed)}
    <main>
      <h1 aria-live="polite">${sentence(troubles, feed.isLive)}</h1>
      <p class="summary">${summary(feed.fleet)}</p>
      <div class="two">${troubleList(troubles, now)}${waitingList(feed.fleet, view, now)}</div>
      ${orderList(feed.fleet, now)}
      ${fleetView(feed.fleet, view)}
    </main>
    ${view.subject ? panelView(feed, view.subject, panel, now) : nothing}`;
}

/** The page's title: a number that can be seen in a row of tabs. */
export function titleOf(feed) {
  if (!feed.fleet) return "Outfitter";
  const urgent = feed.troubles.filter(each => each.urgent).length;
  const place = feed.status.cluster ? `Outfitter ${feed.status.cluster}` : "Outfitter";
  return `${urgent ? `(${urgent}) ` : ""}${feed.isLive ? "" : "Not live: "}${place}`;
}
