// The page: takes what the server sends each second, and draws the list, one conversation, and the process.
// Text always goes in as text, never as markup.

import { Bar, REGIONS, column, fillChart, shareBar, sparkline, split, trend } from "./charts.js";

const FIRST_ROWS = 150;
const NEARLY_FULL = 0.8;
const LAG_SAMPLES = 120;
const WIDE = 1080;

const state = {
  rows: new Map(), snapshot: null, lag: [], chosen: "", fill: -1, text: "", order: "full", all: false,
  drawn: new Map(), sequence: [], detail: null, source: null, dirty: false, greeted: false,
};

const find = (id) => document.getElementById(id);
const number = (value) => Math.round(value || 0).toLocaleString("en");
const percent = (share) => `${Math.round(100 * share)} %`;
const fillOf = (row) => (row.window ? (row.tokens || 0) / row.window : 0);
const pressureOf = (row) => (row.budget ? (row.tokens || 0) / row.budget : 0);

function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function plural(count, noun) {
  return `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
}

function short(value) {
  if (value >= 1e9) return `${(value / 1e9).toFixed(1)} B`;
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (value >= 1e4) return `${Math.round(value / 1e3)} k`;
  return number(value);
}

function ago(seconds) {
  if (seconds < 2) return "now";
  if (seconds < 60) return `${Math.round(seconds)} s ago`;
  if (seconds < 3600) return `${Math.round(seconds / 60)} min ago`;
  return `${Math.round(seconds / 3600)} h ago`;
}

const since = (at) => ago(Math.max(0, Date.now() / 1000 - at));

// What the server sends.

function connect() {
  state.source?.close();
  const source = (state.source = new EventSource("events"));
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
  if (state.chosen && update.rows.some((row) => row.name === state.chosen)) loadDetail();
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
    if (!answer.ok || state.chosen !== name) return;
    state.detail = await answer.json();
    drawDetail();
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
    const label = make("span", { className: "range" }, index === 9 ? "90 % +" : `${10 * index}–${10 * index + 10}`);
    button.replaceChildren(make("b", {}, count ? number(count) : ""), column(count / most), label);
  });
}

// The regions that some conversation has; the legend grows with them.
function drawLegend(rows) {
  const present = new Set(rows.flatMap((row) => Object.keys(row.regions || {})));
  if (rows.some((row) => row.newest)) present.add("newest");
  const entries = REGIONS.filter(([name]) => present.has(name)).map(([, label, style]) => [label, style]);
  if (rows.some((row) => row.bounded)) entries.push(["at most (not counted)", "bound"]);
  const legend = find("legend");
  if (legend.children.length === entries.length) return;
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
    this.about.textContent = ` · ${since(row.last)}`;
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
  else drawDetail();
  draw();
}

// Where one conversation stands below the list, who chose it is taken there.
function chooseByAddress() {
  const name = decodeURIComponent(location.hash.slice(1));
  if (!name) state.greeted = true;
  choose(name);
  if (name && innerWidth <= WIDE) find("detail").scrollIntoView();
}

function drawDetail() {
  const aside = find("detail");
  const scrolled = aside.scrollTop;
  if (!state.detail) {
    aside.replaceChildren(make("h2", { id: "detail-title" }, "One conversation"), make("p", { className: "hint" }, "Choose one from the list: its fill over time, each compaction, and what its block holds."));
    return;
  }
  const { row, points, compactions } = state.detail;
  const close = make("button", { type: "button", title: "Close" }, "✕", make("span", { className: "hidden" }, " Close"));
  close.addEventListener("click", leave);
  const head = make("div", { className: "detail-head" }, make("h2", { id: "detail-title" }, row.name), close);
  const facts = [row.model, row.upstream, row.api, row.agent, row.project, plural(row.requests, "request"), plural(row.compactions, "compaction")];
  const bar = new Bar();
  bar.draw(row);
  const advice = row.advice ? make("div", { className: "callout" }, make("b", {}, row.advice.text), `What to do: ${row.advice.remedy}.`) : null;
  const open = new Set([...aside.querySelectorAll("details[open]")].map((each) => each.dataset.at));
  aside.replaceChildren(
    head, make("p", { className: "sub" }, facts.filter(Boolean).join(" · ")), advice || "",
    bar.element, regionTable(row), make("h3", {}, "Fill over time"), ...overTime(row, points),
    make("h3", {}, "Compactions, newest first"), compactionList(compactions, open),
    ...tokenFacts(row),
  );
  aside.scrollTop = scrolled;
}

function regionTable(row) {
  const regions = split(row);
  const table = make("div", { className: "parts" });
  table.append(make("span"), make("span"), make("span", { className: "s" }, "tokens"), make("span", { className: "s" }, "of window"));
  if (row.bounded) {
    table.append(make("span", { className: "key bound" }), make("span", {}, "at most: its size in bytes spared the count"), make("span", { className: "n" }, number(row.tokens)), make("span", { className: "s" }, percent(fillOf(row))));
  }
  for (const [name, label, style] of REGIONS) {
    if (!regions[name]) continue;
    const share = row.window ? regions[name] / row.window : 0;
    table.append(make("span", { className: `key ${style}` }), make("span", {}, label), make("span", { className: "n" }, number(regions[name])), make("span", { className: "s" }, share < 0.005 ? "< 1 %" : percent(share)));
  }
  return table;
}

function overTime(row, points) {
  if (!points.length) return [make("p", { className: "note" }, "Nothing was counted yet.")];
  const first = new Date(1000 * points[0][0]).toLocaleTimeString("en-GB");
  const last = new Date(1000 * points[points.length - 1][0]).toLocaleTimeString("en-GB");
  const axis = make("div", { className: "axis" }, make("span", {}, first), make("span", {}, plural(points.length, "request")), make("span", {}, last));
  const note = make("p", { className: "note" }, `Solid: sent upstream. Dashed: as the client sent it (${number(row.before)} tokens last). Red: the window of ${number(row.window)}${row.source ? `, ${row.source}` : ""}.`);
  return [fillChart(points, row.window || 1), axis, note];
}

function compactionList(compactions, open) {
  if (!compactions.length) return make("p", { className: "note" }, "None yet.");
  const list = make("ol", { className: "compactions" });
  for (const entry of [...compactions].reverse()) {
    const when = new Date(1000 * entry.at).toLocaleTimeString("en-GB");
    const line = make("div", { className: "line1" }, make("b", {}, `${number(entry.before)} → ${number(entry.after)}`), make("span", {}, `${when} · ${number(entry.folded)} items folded`));
    const stages = make("ul", { className: "stages" }, ...entry.stages.map((stage) => make("li", {}, `${stage.stage} −${number(stage.tokens)}`)));
    list.append(make("li", {}, line, stages, blockParts(entry), blockText(entry, open)));
  }
  return list;
}

function blockParts(entry) {
  const parts = entry.parts.filter((part) => part.tokens > 0);
  const whole = parts.reduce((sum, part) => sum + part.tokens, 0);
  if (!whole) return null;
  const grid = make("div", { className: "block" });
  for (const part of parts) grid.append(make("span", {}, part.kind), shareBar(part.tokens / whole, "summary"), make("span", { className: "n" }, `${number(part.tokens)} in ${number(part.lines)} lines`));
  if (entry.summary_by) grid.append(make("span", {}, "written by"), make("span", {}, entry.summary_by), make("span"));
  return grid;
}

function blockText(entry, open) {
  if (!entry.block) return null;
  const details = make("details", {}, make("summary", {}, "The block's text"), make("pre", { tabIndex: 0 }, entry.block));
  details.dataset.at = entry.at;
  details.open = open.has(String(entry.at));
  return details;
}

function tokenFacts(row) {
  const table = make("div", { className: "parts" });
  const facts = [["kept back by compaction, in all", row.removed_sum], ["input that the provider reported", row.input_sum], ["of it read from its cache", row.cached_sum], ["output", row.output_sum], ["for summaries in the view", row.summary_tokens]];
  for (const [label, value] of facts) {
    if (value) table.append(make("span"), make("span", {}, label), make("span", { className: "n" }, number(value)), make("span", { className: "s" }, label.startsWith("of it") ? percent(value / row.input_sum) : ""));
  }
  return table.children.length ? [make("h3", {}, "Tokens"), table] : [];
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
  const at = links.indexOf(document.activeElement);
  const next = links[Math.max(0, Math.min(links.length - 1, at + step))];
  next?.focus();
}

function onKey(event) {
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
  find("more").addEventListener("click", () => { state.all = !state.all; draw(); });
  find("login-form").addEventListener("submit", logIn);
  find("logout").addEventListener("click", logOut);
  document.addEventListener("keydown", onKey);
  addEventListener("hashchange", chooseByAddress);
  choose(decodeURIComponent(location.hash.slice(1)));
  start();
}

prepare();
