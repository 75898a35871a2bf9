// Small charts of the last minutes: they begin when the page was opened, at most five minutes ago. Lines break where nothing was measured.

import { byId, h, ms, s, setAttribute, setText, short } from "./dom.js";

const SIZE = { width: 200, height: 72 };
const SPAN_S = { least: 30, most: 300 };
const seconds = (value) => ms(value * 1000);
const CHARTS = [
  { title: "Time to first token", lines: [["ttft50", "median"], ["ttft95", "95 %"]], format: seconds, least: 0.05 },
  { title: "Between tokens", lines: [["token50", "median"], ["token95", "95 %"]], format: seconds, least: 0.01 },
  { title: "Queue", lines: [["waiting", "waiting"], ["running", "running"]], format: (value) => String(Math.round(value)), least: 4 },
  { title: "Tokens per second", lines: [["output", "generated"], ["prompt", "prefilled"]], format: short, least: 10 },
  { title: "Cache hits", lines: [["hits", "of prompts"]], format: (value) => `${Math.round(value)}\u00a0%`, least: 100 },
];

export class Charts {
  constructor() {
    this.drawn = CHARTS.map(create);
    byId("charts").append(...this.drawn.map((chart) => chart.node));
  }

  show(history) {
    this.drawn.forEach((chart, at) => update(chart, CHARTS[at], history.points, history.now.at));
  }
}

function create({ title, lines }) {
  const paths = lines.map((_, at) => s("path", { class: `series s${at}` }));
  const top = h("p", { class: "axis", "aria-hidden": "true" });
  const grid = [0.5, 1].map((share) => s("line", { class: "rule", x1: 0, x2: SIZE.width, y1: SIZE.height * share - 0.5, y2: SIZE.height * share - 0.5 }));
  const svg = s("svg", { viewBox: `0 0 ${SIZE.width} ${SIZE.height}`, preserveAspectRatio: "none", role: "img", "aria-label": title }, ...grid, ...paths);
  const values = lines.map(() => h("b"));
  const legend = h("p", { class: "series-names" }, ...lines.map(([, name], at) => h("span", {}, h("span", { class: `swatch s${at}` }), `${name} `, values[at])));
  const since = h("span");
  const axis = h("p", { class: "times", "aria-hidden": "true" }, since, h("span", { text: "now" }));
  return { node: h("figure", { class: "chart" }, h("figcaption", { text: title }), legend, top, svg, axis), svg, paths, top, since, values };
}

function update(chart, { title, lines, format, least }, points, now) {
  const span = Math.min(SPAN_S.most, Math.max(SPAN_S.least, now - (points[0]?.at ?? now)));
  const shown = points.filter((point) => point.at >= now - span);
  const top = Math.max(least, ...lines.flatMap(([name]) => shown.map((point) => point[name] || 0)));
  const place = (point, name) => `${(SIZE.width * (1 - (now - point.at) / span)).toFixed(1)} ${(SIZE.height - 2 - ((SIZE.height - 14) * point[name]) / top).toFixed(1)}`;
  const latest = lines.map(([name], at) => {
    let drawing = "", pen = "M";
    for (const point of shown) {
      if (point[name] === null || point[name] === undefined) { pen = "M"; continue; }
      drawing += `${pen}${place(point, name)}${pen === "M" ? "h0.01" : ""}`;
      pen = "L";
    }
    setAttribute(chart.paths[at], "d", drawing || "M0 0");
    const last = shown.filter((point) => point[name] !== null && point[name] !== undefined).pop();
    const text = last ? format(last[name]) : "–";
    setText(chart.values[at], text);
    return `${lines[at][1]} ${last ? text : "not measured"}`;
  });
  setText(chart.top, format(top));
  setText(chart.since, span < 60 ? `${Math.round(span)} s ago` : `${Math.round(span / 60)} min ago`);
  setAttribute(chart.svg, "aria-label", `${title}: ${latest.join(", ")}`);
}
