// Small tools: elements, formats, and changes only where something changed.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "text") node.textContent = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
export const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
export const byId = (id) => document.getElementById(id);

export function setText(node, text) {
  const wanted = String(text);
  if (node.textContent !== wanted) node.textContent = wanted;
}

export function setAttribute(node, name, value) {
  const wanted = String(value);
  if (node.getAttribute(name) !== wanted) node.setAttribute(name, wanted);
}

// Children of `parent` become those of `wanted` (a Map from key to what it shows), in its order. An element stays what it was, so
// that focus, open details and animations stay too.
export function keyed(parent, nodes, wanted, create, update) {
  for (const [key, entry] of nodes) if (!wanted.has(key)) { entry.node.remove(); nodes.delete(key); }
  let place = parent.firstElementChild;
  for (const [key, value] of wanted) {
    let entry = nodes.get(key);
    if (!entry) { entry = create(value, key); nodes.set(key, entry); }
    if (entry.node === place) place = place.nextElementSibling;
    else parent.insertBefore(entry.node, place);
    update(entry, value, key);
  }
}

export function bytes(count) {
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) if (count >= size) return `${short(count / size)} ${unit}`;
  return `${Math.round(count)} B`;
}

export const rate = (perSecond) => (perSecond >= 1e8 ? `${short(perSecond / 1e9)} GB/s` : `${bytes(perSecond)}/s`);

export function short(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  return size >= 100 ? Math.round(value).toString() : size >= 10 ? value.toFixed(1) : size >= 0.01 ? value.toFixed(2) : value.toPrecision(1);
}

export function ms(value) {
  if (value === null || value === undefined) return "–";
  return value >= 10000 ? `${(value / 1000).toFixed(1)} s` : value >= 1000 ? `${(value / 1000).toFixed(2)} s` : value >= 10 ? `${Math.round(value)} ms` : `${value.toFixed(1)} ms`;
}

// "prefill-1a2b3c4d5e6f" is long where there are few workers: its first letters are enough to tell it from others.
export const workerName = (id) => id.replace(/-([0-9a-f]{4})[0-9a-f]+$/, "-$1");

// Nothing on a page may wait for the next tick to say what happened.
export function announce(text) {
  byId("news").textContent = text;
}
