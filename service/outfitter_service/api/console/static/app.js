// The console: what people do, and when the page is drawn.
import { render } from "./vendor/lit-html.js";
import { Api } from "./api.js";
import { Feed } from "./feed.js";
import { pageView, titleOf } from "./page.js";
import { Panel, subjectOf } from "./panel.js";

const THEME = "outfitter-theme";
const REDRAW_MS = 15_000; // how often the times on the page grow

const root = document.documentElement;
const api = new Api(new URL(root.dataset.api, document.baseURI).href);
const view = {
  only: null, resource: null, model: null, find: "", sort: "trouble", focus: null, subject: null, allGroups: false,
  isDark: false,
};
const panel = new Panel(api, draw);
const feed = new Feed(api, { changed: draw, stepped: host => panel.stepped(host), refused: askForToken });
let isDue = false, opener = null;

/** Draw the page in the next frame, once for all changes until then. */
function draw() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    try {
      drawNow();
      delete root.dataset.broken;
    } catch (error) {
      root.dataset.broken = ""; // the page says that it does not change any more
      console.error(error);
    }
  });
}

function drawNow() {
  const start = performance.now();
  render(pageView(feed, view, panel), document.body);
  document.title = titleOf(feed);
  performance.clearMeasures("draw"); // only the last one is kept
  performance.measure("draw", { start });
}

const afterDraw = act => requestAnimationFrame(() => requestAnimationFrame(act));

function askForToken() {
  afterDraw(() => document.getElementById("token")?.focus());
}

// ---- colours

function useTheme(theme) {
  if (theme) root.dataset.theme = theme;
  view.isDark = (theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
}

function switchTheme() {
  const theme = view.isDark ? "light" : "dark";
  localStorage.setItem(THEME, theme);
  useTheme(theme);
}

// ---- the panel

function showSubject() {
  const subject = subjectOf(location.hash), wasOpen = view.subject !== null;
  if (subject && !wasOpen) opener = document.activeElement?.getAttribute("href");
  view.subject = subject;
  if (subject?.kind === "host") view.focus = subject.name;
  panel.show(subject);
  draw();
  if (subject) afterDraw(() => document.getElementById("panel-title")?.focus());
  else if (wasOpen) afterDraw(() => (linkOf(opener) ?? document.querySelector(".host[tabindex='0']"))?.focus());
}

const linkOf = address => (address ? document.querySelector(`a[href="${CSS.escape(address)}"]`) : null);

function closePanel() {
  history.pushState(null, "", location.pathname + location.search);
  showSubject();
}

// ---- keys

/** Where an arrow key leads from a tile; undefined: nowhere. */
function tileFrom(tile, key) {
  const tiles = [...document.querySelectorAll(".host")], at = tiles.indexOf(tile);
  const columns = tiles.filter(each => each.offsetTop === tiles[0].offsetTop).length;
  const sideways = { ArrowRight: 1, ArrowLeft: -1, Home: -at, End: tiles.length - 1 - at };
  const steps = { ...sideways, ArrowDown: columns, ArrowUp: -columns };
  return key in steps ? tiles[at + steps[key]] ?? tile : undefined;
}

function moveTo(tile) {
  view.focus = tile.dataset.host;
  for (const stop of document.querySelectorAll(".host[tabindex='0']")) stop.tabIndex = -1;
  tile.tabIndex = 0; // before the next frame, too: Shift+Tab would else lead to the tile that had the stop
  tile.focus();
  draw();
}

document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  const tile = event.target.closest?.(".host"), next = tile && tileFrom(tile, event.key);
  if (next) {
    event.preventDefault();
    moveTo(next);
  } else if (event.key === "/" && !event.target.matches("input, select")) {
    event.preventDefault();
    document.getElementById("find")?.focus();
  } else if (event.key === "Escape" && view.subject) closePanel();
  else if (event.key === "Enter" && event.target.id === "find") openFound();
});

/** Enter in the search opens the first tile that it left, or looks the worker up. */
function openFound() {
  const found = document.querySelector("#fleet .host, #fleet .none a");
  if (view.find.trim() && found) location.hash = found.getAttribute("href");
}

// ---- clicks and forms

const ACTIONS = {
  theme: switchTheme,
  close: closePanel,
  retry: () => feed.retry(),
  "all-groups": () => (view.allGroups = true),
};

document.addEventListener("click", event => {
  const button = event.target.closest("button");
  if (!button) return;
  if (button.dataset.only) view.only = view.only === button.dataset.only ? null : button.dataset.only;
  const { resource, model = null } = button.dataset;
  if (resource !== undefined) {
    const isOn = view.resource === resource && view.model === model;
    Object.assign(view, isOn ? { resource: null, model: null } : { resource, model });
  }
  ACTIONS[button.id]?.();
  draw();
});

document.addEventListener("input", event => {
  if (event.target.id === "find") view.find = event.target.value;
  if (event.target.id === "sort") view.sort = event.target.value;
  draw();
});

document.addEventListener("submit", event => {
  event.preventDefault();
  if (event.target.id === "token-form") feed.giveToken(event.target.querySelector("input").value.trim());
});

window.addEventListener("hashchange", () => {
  if (location.hash === "#fleet") document.getElementById("fleet")?.focus();
  else showSubject();
});
window.addEventListener("popstate", () => location.hash === "" && showSubject());

useTheme(localStorage.getItem(THEME));
view.subject = subjectOf(location.hash);
if (view.subject) panel.show(view.subject);
setInterval(() => (feed.isLive ? null : draw()), 1_000);
setInterval(draw, REDRAW_MS);
document.body.replaceChildren();
draw();
feed.run();
