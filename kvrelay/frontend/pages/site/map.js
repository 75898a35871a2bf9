// The cluster as a picture: a column per role (a row on narrow screens), and what flows between each pair.

import { bytes, byId, keyed, rate, s, setAttribute, setText, workerName } from "./dom.js";

const NODE = { width: 176, height: 66 };
const GAP = 26;
const NARROW = 620;
const MOST_PAIRS = 24; // more idle ones are not drawn
const COLUMNS = [["encode"], ["prefill"], ["decode", "whole"]];
const TITLES = ["Encode", "Prefill", "Decode"];
const TAKERS = { encode: ["prefill", "whole"], prefill: ["decode"] };

export class ClusterMap {
  constructor() {
    this.edges = s("g");
    this.titles = s("g", { class: "columns-titles" });
    this.nodes = s("g");
    this.labels = s("g");
    this.svg = s("svg", { class: "map", role: "img", "aria-labelledby": "map-title map-text" }, s("desc", { id: "map-text" }), this.edges, this.titles, this.nodes, this.labels);
    this.drawn = { nodes: new Map(), edges: new Map(), labels: new Map(), titles: new Map() };
    byId("map").append(this.svg);
    new ResizeObserver(() => this.history && this.show(this.history)).observe(byId("map"));
  }

  show(history) {
    this.history = history;
    const workers = history.workers();
    const columns = COLUMNS.map((roles) => workers.filter((worker) => roles.includes(worker.role)));
    const places = this.layout(columns);
    const flows = withIdlePairs(history.flows(), workers);
    this.drawTitles(columns, places);
    this.drawNodes(workers, places);
    this.drawFlows(flows, places);
    setText(this.svg.querySelector("desc"), described(workers, flows));
    const { cluster } = history.now;
    setText(byId("map-note"), `${cluster.in_flight} in flight${cluster.stranded ? `, ${cluster.stranded} wait for a worker` : ""}`);
  }

  layout(columns) {
    const width = Math.max(300, byId("map").clientWidth), upright = width < NARROW;
    const shown = columns.filter((column) => column.length);
    const most = Math.max(1, ...shown.map((column) => column.length));
    const nodeWidth = upright ? Math.min(NODE.width, (width - GAP / 2) / Math.min(2, most) - GAP / 2) : NODE.width;
    const perRow = upright ? Math.max(1, Math.floor((width + GAP / 2) / (nodeWidth + GAP / 2))) : 1;
    const places = new Map();
    let top = upright ? 22 : 30;
    const height = upright ? 0 : 34 + most * (NODE.height + GAP);
    shown.forEach((column, at) => {
      const step = shown.length > 1 ? (width - NODE.width - 2) / (shown.length - 1) : 0;
      column.forEach((worker, index) => {
        if (upright) {
          const row = Math.floor(index / perRow), inRow = Math.min(perRow, column.length - row * perRow);
          const left = (width - inRow * nodeWidth - (inRow - 1) * (GAP / 2)) / 2;
          places.set(worker.id, { x: left + (index % perRow) * (nodeWidth + GAP / 2), y: top + row * (NODE.height + GAP / 2), width: nodeWidth, index });
        } else {
          const room = (height - 34) / column.length;
          places.set(worker.id, { x: shown.length > 1 ? 1 + at * step : (width - NODE.width) / 2, y: 30 + room * index + (room - NODE.height) / 2, width: NODE.width, index });
        }
      });
      if (upright) top += Math.ceil(column.length / perRow) * (NODE.height + GAP / 2) + 76;
    });
    this.upright = upright;
    const total = upright ? top - 74 : height;
    setAttribute(this.svg, "viewBox", `0 0 ${width} ${total}`);
    setAttribute(this.svg, "height", total);
    return places;
  }

  drawTitles(columns, places) {
    const wanted = new Map(columns.map((column, at) => [TITLES[at], column]).filter(([, column]) => column.length));
    keyed(this.titles, this.drawn.titles, wanted, (_, title) => ({ node: s("text", { class: "column-title", text: title }) }), ({ node }, column, title) => {
      const first = places.get(column[0].id);
      const top = Math.min(...column.map((worker) => places.get(worker.id).y));
      setAttribute(node, "x", first.x + 2);
      setAttribute(node, "y", this.upright ? top - 8 : 14);
      const whole = column.some((worker) => worker.role === "whole"), decode = column.some((worker) => worker.role === "decode");
      setText(node, title !== "Decode" ? title : whole ? (decode ? "Decode and whole" : "Whole") : "Decode");
    });
  }

  drawNodes(workers, places) {
    const wanted = new Map(workers.map((worker) => [worker.id, worker]));
    keyed(this.nodes, this.drawn.nodes, wanted, createNode, (entry, worker) => updateNode(entry, worker, places.get(worker.id)));
  }

  drawFlows(flows, places) {
    const wanted = new Map(flows.map((flow) => [`${flow.from} ${flow.to}`, flow]));
    keyed(this.edges, this.drawn.edges, wanted, () => ({ node: s("path", { class: "edge" }) }), ({ node }, flow) => {
      setAttribute(node, "d", path(...this.ends(flow, places)));
      setAttribute(node, "class", `edge ${flow.perSecond > 0 ? "flowing" : flow.total > 0 ? "used" : "idle"}`);
      setAttribute(node, "stroke-width", (1.5 + (flow.perSecond > 0 ? Math.min(6, Math.log10(1 + flow.perSecond / 1e5)) : 0)).toFixed(1));
    });
    const spoken = new Map([...wanted].filter(([, flow]) => flow.total > 0));
    keyed(this.labels, this.drawn.labels, spoken, () => {
      const text = s("text", { "text-anchor": "middle" }), box = s("rect", { rx: 8, height: 18 });
      return { node: s("g", { class: "flow" }, box, text), text, box };
    }, ({ node, text, box }, flow) => {
      setText(text, flow.perSecond > 0 ? rate(flow.perSecond) : this.upright ? bytes(flow.total) : `${bytes(flow.total)} moved`);
      const [from, to] = this.ends(flow, places);
      // Neighbours change sides, so that lines that cross have their words apart.
      const share = spoken.size < 2 ? 0.5 : (places.get(flow.from).index + places.get(flow.to).index) % 2 ? 0.72 : 0.28;
      const x = from.x + (to.x - from.x) * bend(share, !this.upright), y = from.y + (to.y - from.y) * bend(share, this.upright);
      const width = text.textContent.length * 6.6 + 14;
      setAttribute(node, "class", `flow ${flow.perSecond > 0 ? "flowing" : ""}`);
      setAttribute(node, "transform", `translate(${x.toFixed(1)} ${y.toFixed(1)})`);
      setAttribute(text, "y", 4);
      setAttribute(box, "x", -width / 2);
      setAttribute(box, "y", -9);
      setAttribute(box, "width", width);
    });
  }

  ends(flow, places) {
    const a = places.get(flow.from), b = places.get(flow.to);
    return this.upright
      ? [{ x: a.x + a.width / 2, y: a.y + NODE.height, upright: true }, { x: b.x + b.width / 2, y: b.y }]
      : [{ x: a.x + a.width, y: a.y + NODE.height / 2 }, { x: b.x, y: b.y + NODE.height / 2 }];
  }
}

// Where a point of the curve lies, as a share of the way: along its direction, or across.
const bend = (at, along) => (along ? 1.5 * at * (1 - at) + at ** 3 : at * at * (3 - 2 * at));

function path(from, to) {
  const mid = from.upright ? (from.y + to.y) / 2 : (from.x + to.x) / 2;
  return from.upright
    ? `M${from.x} ${from.y} C${from.x} ${mid} ${to.x} ${mid} ${to.x} ${to.y}`
    : `M${from.x} ${from.y} C${mid} ${from.y} ${mid} ${to.y} ${to.x} ${to.y}`;
}

function withIdlePairs(flows, workers) {
  const known = new Set(flows.map((flow) => `${flow.from} ${flow.to}`));
  const idle = [];
  for (const from of workers) for (const to of workers) {
    if (!(TAKERS[from.role] || []).includes(to.role) || known.has(`${from.id} ${to.id}`)) continue;
    if (from.state === "ready" && to.state === "ready") idle.push({ from: from.id, to: to.id, total: 0, perSecond: 0 });
  }
  return idle.length + flows.length > MOST_PAIRS ? flows : [...flows, ...idle];
}

function createNode(worker) {
  const box = s("rect", { class: "box", height: NODE.height, rx: 10 });
  const band = s("rect", { class: `band ${worker.role}`, width: 5, height: NODE.height - 16, x: 7, y: 8, rx: 2.5 });
  const name = s("text", { class: "name", x: 20, y: 22 });
  const load = s("text", { class: "load", x: 20, y: 40 });
  const bar = s("rect", { class: "bar-back", x: 20, y: 50, height: 6, rx: 3 });
  const used = s("rect", { class: `bar-used ${worker.role}`, x: 20, y: 50, height: 6, rx: 3 });
  const dot = s("circle", { class: "dot", r: 5, cy: 18 });
  return { node: s("g", { class: "node" }, box, band, name, load, bar, used, dot), box, name, load, bar, used, dot };
}

function updateNode(entry, worker, place) {
  setAttribute(entry.node, "transform", `translate(${place.x.toFixed(1)} ${place.y.toFixed(1)})`);
  setAttribute(entry.node, "class", `node ${worker.state}`);
  entry.node.dataset.worker = worker.id;
  setAttribute(entry.box, "width", place.width);
  setAttribute(entry.dot, "cx", place.width - 14);
  setText(entry.name, workerName(worker.id));
  const busy = worker.running + worker.transferring;
  setText(entry.load, worker.state === "ready" ? `${busy} running${worker.waiting ? `, ${worker.waiting} waiting` : ""}` : worker.state);
  const { total, free, cached } = worker.blocks;
  const room = place.width - 34;
  setAttribute(entry.bar, "width", total ? room : 0);
  setAttribute(entry.used, "width", total ? ((room * (total - free - cached)) / total).toFixed(1) : 0);
}

function described(workers, flows) {
  const nodes = workers.map((worker) => `${worker.id} is ${worker.state} and has ${worker.running} running`);
  const moving = flows.filter((flow) => flow.total > 0).map((flow) => `${flow.from} to ${flow.to}: ${rate(flow.perSecond)}, ${bytes(flow.total)} in all`);
  return [...nodes, ...moving].join("; ");
}
