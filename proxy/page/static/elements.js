// What the page's parts share: elements, and figures as text.

export const number = (value) => Math.round(value || 0).toLocaleString("en");
export const percent = (share) => `${Math.round(100 * share)} %`;
export const fillOf = (row) => (row.window ? (row.tokens || 0) / row.window : 0);

export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function plural(count, noun) {
  return `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
}

export function short(value) {
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

export const since = (at) => ago(Math.max(0, Date.now() / 1000 - at));
