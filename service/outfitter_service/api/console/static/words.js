// Words for numbers and times, and small pieces of text that several views have.
import { html } from "./vendor/lit-html.js";

export const number = n => n.toLocaleString("en");

/** "1 host", "2 hosts". */
export const count = (n, one, more = `${one}s`) => `${number(n)} ${n === 1 ? one : more}`;

/** Milliseconds as people say them: "40 s", "14 min", "3 h", "12 d". */
export function duration(ms) {
  const s = Math.max(0, Math.round(ms / 1000));
  if (s < 100) return `${s} s`;
  if (s < 100 * 60) return `${Math.round(s / 60)} min`;
  return s < 48 * 3600 ? `${Math.round(s / 3600)} h` : `${Math.round(s / 86400)} d`;
}

/** The moment of a record, as a clock shows it here; with the day unless it is today. */
export function moment(text, now) {
  const at = new Date(text), time = at.toLocaleTimeString("en-GB");
  const shown = at.toDateString() === new Date(now).toDateString() ? time : `${at.toLocaleDateString("en-CA")} ${time}`;
  return html`<time datetime=${text} title=${text}>${shown}</time>`;
}

/** A text of ours, with the commands between its backticks set as code. What strangers wrote is no such text. */
export const withCode = text => text.split("`").map((part, n) => (n % 2 ? html`<code>${part}</code>` : part));

/** How old the picture is that a feed has. */
export const oldness = feed => `the picture is ${duration(feed.age)} old`;

/** What a worker wants: "gpu 4, fpga 1". */
export const amounts = wanted =>
  Object.entries(wanted ?? {}).map(([name, amount]) => `${name}\u00a0${amount}`).join(", ") || "nothing";

/** What an order takes out, in words. */
export const aboutOf = ({ resource, device }) => (device ? `the device ${device}` : resource ?? "all devices");

/** The address of something's panel. */
export const addressOf = (kind, ...names) =>
  `#${[kind, ...names].map(name => encodeURIComponent(name.toWellFormed())).join("/")}`;

export const linkTo = (kind, names, text) => html`<a href=${addressOf(kind, ...names)}>${text ?? names.at(-1)}</a>`;

// Without a part that changes, for there are thousands of them.
const CELLS = {
  unhealthy: html`<i class="cell unhealthy"></i>`,
  unknown: html`<i class="cell unknown"></i>`,
  stranger: html`<i class="cell stranger"></i>`,
  cordoned: html`<i class="cell cordoned"></i>`,
  held: html`<i class="cell held"></i>`,
  free: html`<i class="cell free"></i>`,
};

/** The shape of a device's state. The words beside it, or the label around it, say the same. */
export const cell = state => CELLS[state];
