// Draws one conversation. What someone may be reading or has reached by keyboard stays the same element while new
// requests come: the button, and the list of compactions with the texts of their blocks.

import { Bar, REGIONS, fillChart, shareBar, split } from "./charts.js";
import { fillOf, make, number, percent, plural } from "./elements.js";

const HINT = "Choose one from the list: its fill over time, each compaction, and what its block holds.";
const GONE = "It is not live: no request of it came within the last hour, or the proxy was started again.";

export class Panel {
  constructor(element, leave) {
    this.element = element;
    this.leave = leave;
    this.name = "";
  }

  // Shows *detail*, what the server answers for the *chosen* conversation, or null if there is none.
  draw(detail, chosen) {
    if (!detail) {
      this.name = "";
      this.element.replaceChildren(this.heading(chosen), make("p", { className: "hint" }, chosen ? GONE : HINT));
      return;
    }
    if (this.name !== detail.row.name) this.begin(detail.row.name);
    const { row, points } = detail;
    const advice = row.advice ? make("div", { className: "callout" }, make("b", {}, row.advice.text), `What to do: ${row.advice.remedy}.`) : null;
    this.facts.textContent = factsOf(row);
    this.advice.replaceChildren(...[advice].filter(Boolean));
    this.bar.draw(row);
    this.regions.replaceChildren(regionTable(row));
    this.time.replaceChildren(...overTime(row, points));
    this.drawCompactions(detail.compactions);
    this.tokens.replaceChildren(...tokenFacts(row));
  }

  heading(name) {
    const title = make("h2", { id: "detail-title" }, name || "One conversation");
    if (!name) return title;
    const close = make("button", { type: "button", title: "Close" }, "✕", make("span", { className: "hidden" }, " Close"));
    close.addEventListener("click", this.leave);
    return make("div", { className: "detail-head" }, title, close);
  }

  begin(name) {
    this.name = name;
    this.facts = make("p", { className: "sub" });
    [this.advice, this.regions, this.time, this.tokens] = [0, 1, 2, 3].map(() => make("div"));
    this.bar = new Bar();
    this.none = make("p", { className: "note" }, "None yet.");
    this.compactions = make("ol", { className: "compactions", hidden: true });
    this.drawn = new Map();
    this.element.replaceChildren(
      this.heading(name), this.facts, this.advice, this.bar.element, this.regions,
      make("h3", {}, "Fill over time"), this.time,
      make("h3", {}, "Compactions, newest first"), this.none, this.compactions, this.tokens,
    );
    this.element.scrollTop = 0;
  }

  // An entry never changes; new ones go before the others, and the oldest are forgotten.
  drawCompactions(entries) {
    const keys = new Set(entries.map(keyOf));
    for (const [key, item] of this.drawn) {
      if (keys.has(key)) continue;
      item.remove();
      this.drawn.delete(key);
    }
    for (const entry of entries) {
      if (this.drawn.has(keyOf(entry))) continue;
      const item = compaction(entry);
      this.drawn.set(keyOf(entry), item);
      this.compactions.prepend(item);
    }
    this.none.hidden = entries.length > 0;
    this.compactions.hidden = !entries.length;
  }
}

const keyOf = (entry) => `${entry.at} ${entry.before}`;

function factsOf(row) {
  const facts = [row.model, row.upstream, row.api, row.agent, row.project, plural(row.requests, "request"), plural(row.compactions, "compaction")];
  return facts.filter(Boolean).join(" · ");
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

function compaction(entry) {
  const when = new Date(1000 * entry.at).toLocaleTimeString("en-GB");
  const line = make("div", { className: "line1" }, make("b", {}, `${number(entry.before)} → ${number(entry.after)}`), make("span", {}, `${when} · ${plural(entry.folded, "item")} folded`));
  const stages = make("ul", { className: "stages" }, ...entry.stages.map((stage) => make("li", {}, `${stage.stage} −${number(stage.tokens)}`)));
  return make("li", {}, line, stages, blockParts(entry), blockText(entry));
}

function blockParts(entry) {
  const parts = entry.parts.filter((part) => part.tokens > 0);
  const whole = parts.reduce((sum, part) => sum + part.tokens, 0);
  if (!whole) return null;
  const grid = make("div", { className: "block" });
  for (const part of parts) grid.append(make("span", {}, part.kind), shareBar(part.tokens / whole, "summary"), make("span", { className: "n" }, `${number(part.tokens)} in ${plural(part.lines, "line")}`));
  if (entry.summary_by) grid.append(make("span", {}, "written by"), make("span", {}, entry.summary_by), make("span"));
  return grid;
}

function blockText(entry) {
  if (!entry.block) return null;
  return make("details", {}, make("summary", {}, "The block's text"), make("pre", { tabIndex: 0 }, entry.block));
}

function tokenFacts(row) {
  const table = make("div", { className: "parts" });
  const facts = [["kept back by compaction, in all", row.removed_sum], ["input that the provider reported", row.input_sum], ["of it read from its cache", row.cached_sum], ["output", row.output_sum], ["for summaries in the view", row.summary_tokens]];
  for (const [label, value] of facts) {
    if (value) table.append(make("span"), make("span", {}, label), make("span", { className: "n" }, number(value)), make("span", { className: "s" }, label.startsWith("of it") ? percent(value / row.input_sum) : ""));
  }
  return table.children.length ? [make("h3", {}, "Tokens"), table] : [];
}
