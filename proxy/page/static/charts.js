// Draws bars and lines as SVG elements. Sizes are attributes: the page's policy allows no inline style.

const NAMESPACE = "http://www.w3.org/2000/svg";

export const REGIONS = [
  ["system", "system", "system"],
  ["tools", "tools", "tools-region"],
  ["format", "format", "format"],
  ["memory", "memory", "memory"],
  ["skills", "skills", "skills"],
  ["knowledge", "knowledge", "knowledge"],
  ["related", "related results", "related"],
  ["summary", "block", "summary"],
  ["user", "user", "user"],
  ["assistant", "assistant", "assistant"],
  ["tool", "tool results", "tool"],
  ["newest", "newest", "newest"],
  ["reserve", "room for the answer", "reserve"],
];

export function svg(name, attributes = {}, ...children) {
  const element = document.createElementNS(NAMESPACE, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

// The tokens of a row by region: what is newest stands apart from the role it belongs to.
export function split(row) {
  const regions = { ...(row.regions || {}) };
  let left = row.newest || 0;
  regions.newest = 0;
  for (const role of ["tool", "user"]) {
    const part = Math.min(left, regions[role] || 0);
    regions[role] = (regions[role] || 0) - part;
    regions.newest += part;
    left -= part;
  }
  return regions;
}

// The bar of a row: its regions from the left, the room for the answer at the right end of the window. Elements are
// made once, so that a change moves them.
export class Bar {
  constructor() {
    this.well = svg("rect", { class: "well", x: 0, y: 0, width: 1000, height: 16 });
    this.bound = svg("rect", { class: "bound", y: 0, height: 16, x: 0, width: 0 });
    this.parts = new Map();
    const children = [this.well, this.bound];
    for (const [name, , style] of REGIONS) {
      const rect = svg("rect", { class: style, y: 0, height: 16, x: 0, width: 0 });
      this.parts.set(name, rect);
      children.push(rect);
    }
    this.limit = svg("line", { class: "limit", y1: 0, y2: 16, x1: 0, x2: 0 });
    this.element = svg("svg", { class: "bar", viewBox: "0 0 1000 16", preserveAspectRatio: "none", role: "img" }, ...children, this.limit);
  }

  draw(row) {
    const scale = 1000 / (row.window || row.tokens || 1);
    const regions = split(row);
    let at = 0;
    for (const [name] of REGIONS) {
      const rect = this.parts.get(name);
      const width = (regions[name] || 0) * scale;
      // A region that is there is seen, however small it is, and stands apart from the next one.
      const shown = width > 0 ? Math.max(2, width - 1.2) : 0;
      let x = at;
      if (name === "reserve") x = Math.max(at, 1000 - width);
      else at += width;
      rect.setAttribute("x", x.toFixed(1));
      rect.setAttribute("width", Math.max(0, Math.min(shown, 1000 - x)).toFixed(1));
    }
    this.bound.setAttribute("width", row.bounded ? Math.min(1000, row.tokens * scale).toFixed(1) : 0);
    const limit = Math.min(1000, (row.budget || row.window || 0) * scale).toFixed(1);
    this.limit.setAttribute("x1", limit);
    this.limit.setAttribute("x2", limit);
    const full = row.window ? Math.round((100 * row.tokens) / row.window) : 0;
    this.element.setAttribute("aria-label", `${full} % of the window: ${described(regions)}`);
  }
}

function described(regions) {
  const named = REGIONS.filter(([name]) => regions[name] > 0);
  return named.map(([name, label]) => `${label} ${regions[name].toLocaleString("en")}`).join(", ") || "not counted";
}

// The fill of the newest requests as a small line, with a tick for each compaction.
export function trend(points) {
  const element = svg("svg", { class: "trend", viewBox: "0 0 96 30", preserveAspectRatio: "none", "aria-hidden": "true" });
  const x = (index) => (points.length > 1 ? (96 * index) / (points.length - 1) : 48);
  const y = (fill) => 29 - (27 * Math.min(1000, fill)) / 1000;
  element.append(svg("line", { class: "edge", x1: 0, x2: 96, y1: 29.5, y2: 29.5 }));
  points.forEach(([, , compacted], index) => {
    if (compacted) element.append(svg("line", { class: "tick", x1: x(index), x2: x(index), y1: 2, y2: 29 }));
  });
  const line = points.map(([, fill], index) => `${x(index).toFixed(1)},${y(fill).toFixed(1)}`).join(" ");
  element.append(svg("polyline", { class: "line", points: line }));
  return element;
}

// A line around one point, which would not be seen else.
function short(point) {
  const [x, y] = point.split(",").map(Number);
  return `${x - 4},${y} ${x + 4},${y}`;
}

// Fill over time: what the client sent (dashed, cut off at the top), what went upstream, and each compaction.
export function fillChart(points, window) {
  const width = 600;
  const height = 150;
  const most = window * 1.12;
  const x = (index) => (points.length > 1 ? 8 + ((width - 16) * index) / (points.length - 1) : width / 2);
  const y = (tokens) => height - 8 - ((height - 16) * Math.min(tokens, most)) / most;
  const path = (column) => points.map((point, index) => `${x(index).toFixed(1)},${y(point[column]).toFixed(1)}`).join(" ");
  const element = svg("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img" });
  element.setAttribute("aria-label", `Fill of ${points.length} requests, ${points.filter((point) => point[3]).length} of them compacted`);
  const sent = path(2);
  if (points.length > 1) {
    const base = y(0).toFixed(1);
    element.append(svg("polygon", { class: "area", points: `${x(0)},${base} ${sent} ${x(points.length - 1)},${base}` }));
  }
  element.append(svg("line", { class: "window", x1: 0, x2: width, y1: y(window), y2: y(window) }));
  element.append(svg("polyline", { class: "sent", points: path(1) }), svg("polyline", { class: "line", points: points.length > 1 ? sent : short(sent) }));
  points.forEach((point, index) => {
    if (!point[3]) return;
    const tick = svg("line", { class: "tick", x1: x(index), x2: x(index), y1: 6, y2: height - 6 });
    tick.append(svg("title"));
    tick.firstChild.textContent = `compacted: ${point[1].toLocaleString("en")} to ${point[2].toLocaleString("en")} tokens`;
    element.append(tick);
  });
  return element;
}

// A share from 0 to 1 as a small bar.
export function shareBar(share, style) {
  const element = svg("svg", { viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" });
  element.append(svg("rect", { class: "well", width: 100, height: 8 }), svg("rect", { class: style, width: (100 * share).toFixed(1), height: 8 }));
  return element;
}

// One column of the histogram of fills.
export function column(share) {
  const height = share > 0 ? Math.max(2, 34 * share) : 0;
  const element = svg("svg", { viewBox: "0 0 10 34", preserveAspectRatio: "none", "aria-hidden": "true" });
  element.append(svg("rect", { class: "well", width: 10, height: 34 }), svg("rect", { class: "level", y: 34 - height, width: 10, height }));
  return element;
}

// A line of figures, the newest at the right end; *floor* is the least height of the scale.
export function sparkline(values, floor) {
  const most = Math.max(floor, ...values);
  const element = svg("svg", { viewBox: "0 0 120 18", preserveAspectRatio: "none", "aria-hidden": "true" });
  const at = values.map((value, index) => `${120 - values.length + 1 + index},${(17 - (16 * value) / most).toFixed(1)}`);
  element.append(svg("polyline", { class: "line", points: at.join(" ") }));
  return element;
}
