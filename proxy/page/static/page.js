// The page: takes what the server sends each second, and draws the list, one conversation, and the process.
// Text always goes in as text, never as markup.

import { Bar, REGIONS, column, sparkline, trend } from "./charts.js";
import { Panel } from "./conversation.js";
import { fillOf, make, number, percent, plural, short, since } from "./elements.js";

const FIRST_ROWS = 150;
const NEARLY_FULL = 0.8;
const LAG_SAMPLES = 120;
const WIDE = 1080;

const state = {
  rows: new Map(), snapshot: null, lag: [], chosen: "", fill: -1, text: "", order: "full", all: false,
  drawn: new Map(), sequence: [], detail: null, source: null, dirty: false, greeted: false,
};

const find = (id) => document.getElementById(id);
const panel = new Panel(find("detail"), leave);
const pressureOf = (row) => (row.budget ? (row.tokens || 0) / row.budget : 0);

// What the server sends.

function connect() {
  state.source?.close();
  const source = (state.source = new EventSource("events"));
  // A new connection sends all rows: the proxy may have been started again, and knows those of before no more.
  source.onopen = () => {
    state.rows.clear();
    if (state.chosen) loadDetail();
  };
  source.onmessage = (event) => {
    apply(JSON.parse(event.data));
    tellLive("on", "live");
  };
  source.onerror = () => {
    tellLive("off", "connecting again");
    if (source.readyState === EventSource.CLOSED) setTimeout(start, 3000);
  };
}

function apply(update) {
  for (const row of update.rows) state.rows.set(row.name, row);
  for (const name of update.gone) state.rows.delete(name);
  state.snapshot = update.snapshot;
  state.lag.push(update.snapshot.lag);
  if (state.lag.length > LAG_SAMPLES) state.lag.shift();
  const isChosen = (name) => name === state.chosen;
  if (state.chosen && (update.rows.some((row) => isChosen(row.name)) || update.gone.some(isChosen))) loadDetail();
  if (!state.dirty) {
    state.dirty = true;
    requestAnimationFrame(draw);
  }
}

function tellLive(style, text) {
  find("live").className = `live ${style}`;
  if (find("live-text").textContent !== text) find("live-text").textContent = text;
}

async function loadDetail() {
  const name = state.chosen;
  try {
    const answer = await fetch(`conversations/${encodeURIComponent(name)}`);
    if (!answer.ok && answer.status !== 404) return;
    const detail = answer.ok ? await answer.json() : null;
    if (state.chosen !== name) return;
    state.detail = detail;
    panel.draw(detail, name);
  } catch {
    tellLive("off", "connecting again");
  }
}

// The whole page.

function draw() {
  state.dirty = false;
  if (!state.snapshot) return;
  const rows = [...state.rows.values()];
  drawFigures(rows);
  drawFills(rows);
  drawLegend(rows);
  drawList(rows);
  drawModels();
  drawParts();
  if (!state.greeted && state.sequence.length) {
    state.greeted = true;
    if (!state.chosen && innerWidth > WIDE) choose(state.sequence[0]);
  }
}

function figure(name, value, note, style = "", chart = null) {
  const noteElement = note ? make("div", { className: "note" }, note) : null;
  const parts = [make("div", { className: "name" }, name), make("div", { className: "value" }, value), chart, noteElement];
  return make("div", { className: `figure ${style}` }, ...parts);
}

function totals() {
  const sums = { requests: 0, refused: 0, compactions: 0, before: 0, sent: 0, removed: 0, input: 0, cached: 0, output: 0 };
  for (const model of Object.values(state.snapshot.models)) for (const name of Object.keys(sums)) sums[name] += model[name] || 0;
  return sums;
}

function drawFigures(rows) {
  const sums = totals();
  const { saved, unpriced, lag } = state.snapshot;
  const full = rows.filter((row) => pressureOf(row) > NEARLY_FULL).length;
  const worst = Math.max(0, ...state.lag);
  const figures = [
    figure("Live conversations", number(rows.length), plural(sums.requests, "request")),
    figure("Nearly full", number(full), "above 80 % of their room", full ? "warn" : ""),
    figure("Compactions", number(sums.compactions), sums.refused ? `${number(sums.refused)} requests refused` : "none refused"),
    figure("Tokens kept back", short(sums.removed), sums.before ? `${percent(sums.removed / sums.before)} of what clients sent` : "of what clients sent"),
    figure("Provider cache", sums.input ? percent(sums.cached / sums.input) : "–", `of ${short(sums.input)} input tokens`),
  ];
  if (saved !== null) {
    const note = unpriced.length ? `without ${unpriced.length} of ${Object.keys(state.snapshot.models).length} models` : "at the price of cached input";
    figures.push(figure("Saved at least", `$${saved.toFixed(saved < 10 ? 2 : 0)}`, note));
  }
  figures.push(figure("Event loop lag", `${Math.round(1000 * lag)} ms`, `worst here: ${Math.round(1000 * worst)} ms`, lag >= 0.2 ? "warn" : "", state.lag.length > 2 ? sparkline(state.lag, 0.02) : null));
  find("figures").replaceChildren(...figures);
  find("version").textContent = state.snapshot.status.version || "";
}

function drawFills(rows) {
  const counts = Array(10).fill(0);
  for (const row of rows) counts[Math.min(9, Math.floor(10 * fillOf(row)))] += 1;
  const most = Math.max(1, ...counts);
  const group = find("fills");
  if (!group.children.length) {
    counts.forEach((_, index) => {
      const button = make("button", { type: "button" });
      button.addEventListener("click", () => {
        state.fill = state.fill === index ? -1 : index;
        draw();
      });
      group.append(button);
    });
  }
  counts.forEach((count, index) => {
    const button = group.children[index];
    button.className = index >= 8 ? "high" : "";
    button.setAttribute("aria-pressed", String(state.fill === index));
    button.setAttribute("aria-label", `${count} conversations from ${10 * index} to ${10 * index + 10} % of their window`);
    const label = make("span", { className: "range" }, index === 9 ? "90 +" : `${10 * index}–${10 * index + 10}`);
    button.replaceChildren(make("b", {}, count ? number(count) : ""), column(count / most), label);
  });
}

// The regions that some conversation has.
function drawLegend(rows) {
  const present = new Set(rows.flatMap((row) => Object.keys(row.regions || {})));
  if (rows.some((row) => row.newest)) present.add("newest");
  const entries = REGIONS.filter(([name]) => present.has(name)).map(([, label, style]) => [label, style]);
  if (rows.some((row) => row.bounded)) entries.push(["at most (not counted)", "bound"]);
  const legend = find("legend");
  if (legend.textContent === entries.map(([label]) => label).join("")) return;
  legend.replaceChildren(...entries.map(([label, style]) => make("li", {}, make("span", { className: `key ${style}` }), label)));
}

// The list.

const ORDERS = {
  full: (a, b) => fillOf(b) - fillOf(a),
  last: (a, b) => b.last - a.last,
  compactions: (a, b) => (b.compactions || 0) - (a.compactions || 0),
  removed: (a, b) => (b.removed_sum || 0) - (a.removed_sum || 0),
};

function matching(rows) {
  const text = state.text.toLowerCase();
  return rows.filter((row) => {
    if (state.fill >= 0 && Math.min(9, Math.floor(10 * fillOf(row))) !== state.fill) return false;
    return !text || `${row.name} ${row.model || ""} ${row.project || ""} ${row.upstream || ""} ${row.agent || ""}`.toLowerCase().includes(text);
  });
}

// Who points at a row or has reached it by keyboard must not see it move away.
function ordered(rows) {
  const list = find("list");
  const isInUse = list.matches(":hover") || list.contains(document.activeElement);
  rows.sort((a, b) => ORDERS[state.order](a, b) || (a.name < b.name ? -1 : 1));
  if (!isInUse || !state.sequence.length) return rows;
  const place = new Map(state.sequence.map((name, index) => [name, index]));
  return rows.sort((a, b) => (place.get(a.name) ?? Infinity) - (place.get(b.name) ?? Infinity) || 0);
}

function drawList(rows) {
  const matched = ordered(matching(rows));
  const shown = state.all ? matched : matched.slice(0, FIRST_ROWS);
  state.sequence = shown.map((row) => row.name);
  const list = find("list");
  const names = new Set(state.sequence);
  for (const [name, item] of state.drawn) {
    if (names.has(name)) continue;
    item.element.remove();
    state.drawn.delete(name);
  }
  let before = null;
  for (const row of shown) {
    let item = state.drawn.get(row.name);
    if (!item) state.drawn.set(row.name, (item = new Item(row.name)));
    item.draw(row);
    const next = before ? before.nextSibling : list.firstChild;
    if (item.element !== next) list.insertBefore(item.element, next);
    before = item.element;
  }
  find("count").textContent = matched.length === rows.length ? number(rows.length) : `${number(matched.length)} of ${number(rows.length)}`;
  const more = find("more");
  more.hidden = matched.length <= FIRST_ROWS;
  more.textContent = state.all ? `Show the first ${FIRST_ROWS} only` : `Show all ${number(matched.length)}`;
  list.hidden = !shown.length;
  drawEmpty(rows.length, matched.length);
}

function drawEmpty(all, matched) {
  const empty = find("empty");
  empty.hidden = matched > 0;
  if (all) empty.textContent = "No conversation matches.";
  else if (matched === 0) empty.replaceChildren("No conversation yet. Point a client here; requests far below their window have no name and are only counted.", make("code", {}, `export OPENAI_BASE_URL=${location.origin}/v1`));
}

class Item {
  constructor(name) {
    this.row = null;
    this.bar = new Bar();
    this.title = make("b");
    this.about = make("i");
    this.name = make("i", { className: "mono" }, name);
    this.fill = make("b");
    this.tokens = make("span");
    this.trend = make("div");
    this.advice = make("div", { className: "advice" });
    const who = make("div", { className: "who" }, this.title, make("span", {}, this.name, this.about));
    const gauge = make("div", { className: "gauge" }, this.bar.element, this.advice);
    const sum = make("div", { className: "sum" }, this.fill, this.tokens);
    this.link = make("a", { className: "row", href: `#${name}` }, who, gauge, sum, this.trend);
    this.element = make("li", {}, this.link);
  }

  draw(row) {
    if (state.chosen === row.name) this.link.setAttribute("aria-current", "true");
    else this.link.removeAttribute("aria-current");
    const about = ` · ${since(row.last)}`;
    if (this.about.textContent !== about) this.about.textContent = about;
    if (row === this.row) return;
    this.row = row;
    this.bar.draw(row);
    this.title.textContent = [row.model || "no model", row.project].filter(Boolean).join(" · ");
    const compactions = row.compactions ? ` · ${row.compactions}×` : "";
    this.fill.textContent = row.window ? `${row.bounded ? "< " : ""}${percent(fillOf(row))}` : "–";
    this.tokens.textContent = row.window ? `${short(row.tokens)} of ${short(row.window)}${compactions}` : "not counted";
    const line = trend(row.trend || []);
    this.trend.replaceWith(line);
    this.trend = line;
    this.advice.hidden = !row.advice;
    this.advice.textContent = row.advice ? row.advice.text : "";
    this.link.className = `row${pressureOf(row) > NEARLY_FULL ? " full" : ""}${row.outcome === "refused" ? " refused" : ""}`;
  }
}

// One conversation.

function choose(name) {
  if (state.chosen === name) return;
  state.chosen = name;
  state.detail = null;
  if (name) loadDetail();
  else panel.draw(null, "");
  draw();
}

// The conversation that the address names. One that cannot be decoded is the name of none.
function addressed() {
  const name = location.hash.slice(1);
  try {
    return decodeURIComponent(name);
  } catch {
    return name;
  }
}

// Who chose a conversation is taken to it: also by keyboard, past all others in the list.
function chooseByAddress() {
  const name = addressed();
  if (!name) state.greeted = true;
  choose(name);
  if (!name) return;
  find("detail").focus({ preventScroll: true });
  if (innerWidth <= WIDE) find("detail").scrollIntoView();
}

// Models, store, summaries, upstreams.

function cells(tag, values, from) {
  return values.map((value, index) => make(tag, tag === "th" ? { className: index >= from ? "num" : "", scope: "col" } : { className: index >= from ? "num" : "" }, value));
}

function drawModels() {
  const { windows, models } = state.snapshot;
  const known = new Map(windows.map((each) => [each.model, each]));
  const head = make("tr", {}, ...cells("th", ["Model", "Upstream", "Window says", "Window", "Requests", "Kept back", "From cache"], 3));
  const rows = [...new Set([...Object.keys(models), ...known.keys()])].sort().map((name) => {
    const window = known.get(name) || {};
    const sums = models[name] || {};
    const says = [window.source, window.how].filter(Boolean).join(", ");
    const share = sums.input ? percent(sums.cached / sums.input) : "–";
    return make("tr", {}, ...cells("td", [name || "none", window.upstream || "", says || "unknown", window.context_window ? number(window.context_window) : "–", number(sums.requests), short(sums.removed), share], 3));
  });
  find("models").replaceChildren(make("thead", {}, head), make("tbody", {}, ...rows));
}

function drawParts() {
  const { status, workers, answered, missed } = state.snapshot;
  const store = status.store || {};
  const summaries = status.summaries || {};
  const facts = [
    ["Workers", answered === workers ? number(workers) : `${answered} of ${workers} answered: the others' conversations are missing`, answered === workers],
    ["Store", [store.kind, store.up === false ? "down" : "up", store.refusal].filter(Boolean).join(", "), store.up !== false],
    ["Summaries", summaryText(summaries)],
    ["Upstreams", (status.upstreams || []).join(", ")],
  ];
  const learned = status.learned || [];
  if (learned.length) facts.push(["Learned windows", learned.map((each) => `${each.model || each.route || ""} ${number(each.context_window || each.window)}`).join(", ")]);
  if (missed) facts.push(["Not shown", `requests of ${missed} seconds: more came than the page reads`, false]);
  const parts = facts.flatMap(([name, text, ok]) => [make("dt", {}, name), make("dd", { className: ok === undefined ? "" : ok ? "ok" : "down" }, text)]);
  find("parts").replaceChildren(...parts);
  find("footer").textContent = `${workers === 1 ? "One process" : `All ${answered} workers of this proxy`}, since its start. Other replicas have pages of their own. Keys: j and k move, Enter opens, / searches, Esc closes.`;
}

function summaryText(summaries) {
  const text = [summaries.mode || "on"];
  if (summaries.running) text.push(`${summaries.running} running`);
  if (summaries.paused || summaries.pauses?.length) text.push("paused");
  return text.join(", ");
}

// Controls.

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  const isDark = theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  find("theme").setAttribute("aria-pressed", String(isDark));
}

function moveBy(step) {
  const links = [...find("list").querySelectorAll("a")];
  let at = links.indexOf(document.activeElement);
  if (at < 0) at = links.indexOf(state.drawn.get(state.chosen)?.link);
  const next = links[Math.max(0, Math.min(links.length - 1, at + step))];
  next?.focus();
}

function onKey(event) {
  if (event.key === "Escape" && event.target === find("search")) {
    event.preventDefault();
    clearSearch();
    return;
  }
  if (event.target.matches("input, select") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "/") {
    event.preventDefault();
    find("search").focus();
  } else if (event.key === "j" || event.key === "ArrowDown") {
    if (event.key === "ArrowDown" && !find("list").contains(event.target)) return;
    event.preventDefault();
    moveBy(1);
  } else if (event.key === "k" || event.key === "ArrowUp") {
    if (event.key === "ArrowUp" && !find("list").contains(event.target)) return;
    event.preventDefault();
    moveBy(-1);
  } else if (event.key === "Escape") {
    leave();
  }
}

function clearSearch() {
  find("search").value = state.text = "";
  draw();
  find("list").focus();
}

function leave() {
  const link = state.drawn.get(state.chosen)?.link;
  choose("");
  if (location.hash) location.hash = "";
  link?.focus();
}

async function logIn(event) {
  event.preventDefault();
  const body = JSON.stringify({ key: find("key").value });
  const answer = await fetch("login", { method: "POST", headers: { "content-type": "application/json" }, body });
  find("key").value = "";
  if (answer.ok) {
    find("login-problem").textContent = "";
    start();
    return;
  }
  find("login-problem").textContent = (await answer.json()).error.message;
  find("key").focus();
}

async function logOut() {
  state.source?.close();
  await fetch("logout", { method: "POST", headers: { "content-type": "application/json" }, body: "{}" });
  location.reload();
}

// Show what this visitor may see.
async function start() {
  let access = "";
  try {
    access = (await (await fetch("session")).json()).access;
  } catch {
    tellLive("off", "no answer");
    setTimeout(start, 3000);
    return;
  }
  find("login").hidden = access !== "login";
  find("closed").hidden = access !== "closed";
  find("page").hidden = !["open", "session"].includes(access);
  find("logout").hidden = access !== "session";
  if (!find("page").hidden) connect();
  else tellLive("", "");
  if (access === "login") find("key").focus();
}

function prepare() {
  setTheme(localStorage.getItem("ullage-theme"));
  find("theme").addEventListener("click", () => {
    const theme = find("theme").getAttribute("aria-pressed") === "true" ? "light" : "dark";
    localStorage.setItem("ullage-theme", theme);
    setTheme(theme);
  });
  find("search").addEventListener("input", (event) => { state.text = event.target.value; draw(); });
  find("order").addEventListener("change", (event) => { state.order = event.target.value; state.sequence = []; draw(); });
  find("skip").addEventListener("click", (event) => {
    event.preventDefault(); // "#list" would be the address of a conversation
    find("list").focus();
  });
  find("more").addEventListener("click", () => { state.all = !state.all; draw(); });
  find("login-form").addEventListener("submit", logIn);
  find("logout").addEventListener("click", logOut);
  document.addEventListener("keydown", onKey);
  addEventListener("hashchange", chooseByAddress);
  choose(addressed());
  start();
}

prepare();
