// The last requests, newest first, each with its timeline.

import { byId, h, keyed, ms, setAttribute, setText, workerName } from "./dom.js";

const SHOWN = 40;
export const STAGES = ["route", "queue", "encode", "prefill", "reserve", "transfer", "hand_over", "decode", "swapped", "restore"];
const stageName = (stage) => stage.replace("_", "-");

export class Requests {
  constructor() {
    this.known = new Map(); // by number and router
    this.rows = new Map();
    this.listeners = [];
    const shown = STAGES.map((stage) => h("li", {}, h("span", { class: `swatch stage-${stage}` }), stageName(stage)));
    byId("stages").append(...shown, h("li", {}, h("span", { class: "swatch first" }), "first token"), h("li", {}, h("span", { class: "swatch again" }), "failover"));
  }

  // Numbers begin anew when the server does.
  restart() { this.known.clear(); }

  take(requests) {
    for (const request of requests) this.known.set(`${request.number} ${request.router}`, { ...request, heardAt: Date.now() });
    const newest = [...this.known].sort(([, a], [, b]) => b.arrived_at - a.arrived_at || b.number - a.number);
    this.known = new Map(newest.slice(0, SHOWN).reverse());
    this.show(new Map(newest.slice(0, SHOWN)));
    for (const listener of this.listeners) listener(requests);
  }

  show(wanted) {
    byId("no-requests").hidden = wanted.size > 0;
    keyed(byId("requests"), this.rows, wanted, () => createRow((name) => this.goTo(name)), updateRow);
  }

  find(name) { return [...this.known.values()].reverse().find((request) => request.id === name || request.answer_id === name); }

  goTo(name) {
    const request = this.find(name);
    const row = request && this.rows.get(`${request.number} ${request.router}`);
    if (!row) return false;
    row.node.querySelector("details").open = true;
    row.summary.focus();
    row.node.scrollIntoView({ block: "nearest" });
    return true;
  }
}

function createRow(goTo) {
  const cells = { state: h("span", { class: "state" }), id: h("span", { class: "id" }), tokens: h("span", { class: "num" }), first: h("span", { class: "num" }), total: h("span", { class: "num" }) };
  const lanes = h("span", { class: "lanes", role: "img" });
  const family = h("span", { class: "family" });
  const summary = h("summary", {}, cells.state, h("span", { class: "who" }, cells.id, family), cells.tokens, cells.first, cells.total, lanes);
  const inside = h("div", { class: "inside" });
  return { node: h("li", {}, h("details", {}, summary, inside)), summary, cells, lanes, family, inside, goTo, drawn: "" };
}

function updateRow(row, request) {
  const { cells } = row;
  setText(cells.state, request.state);
  setAttribute(cells.state, "class", `state ${request.state}`);
  setText(cells.id, request.id);
  setText(row.family, [request.parent ? "continues" : "", request.children.length ? `continued ${request.children.length}×` : "", request.failovers.length ? `sent again ${request.failovers.length}×` : ""].filter(Boolean).join(", "));
  setText(cells.tokens, request.state === "running" ? `${request.prompt_tokens} + …` : `${request.prompt_tokens} + ${request.output_tokens} tokens`);
  setText(cells.first, request.first_token_ms === null ? "" : `first ${ms(request.first_token_ms)}`);
  setText(cells.total, request.state === "running" ? "" : ms(request.total_ms));
  const drawing = JSON.stringify(request, (name, value) => (name === "heardAt" || (name === "total_ms" && request.state === "running") ? undefined : value));
  if (drawing === row.drawn) return;
  row.drawn = drawing;
  setAttribute(row.lanes, "aria-label", described(request));
  row.lanes.replaceChildren(...lanesOf(request).map((lane) => h("span", { class: "lane" }, ...bars(request, lane.stages))), ...marks(request));
  row.inside.replaceChildren(...detailsOf(request, row.goTo));
}

const described = (request) => request.stages.map((one) => `${stageName(one.stage)}${one.worker ? ` on ${one.worker}` : ""} ${ms(one.ms)}`).join(", ") || "No stage has ended yet";

// One for the router, and one for each worker's part of each attempt.
export function lanesOf(request) {
  const lanes = new Map();
  for (const one of request.stages) {
    const key = `${one.attempt} ${one.worker}`;
    if (!lanes.has(key)) lanes.set(key, { worker: one.worker, role: one.role, attempt: one.attempt, stages: [] });
    lanes.get(key).stages.push(one);
  }
  return [...lanes.values()];
}

const span = (request) => Math.max(0.001, request.total_ms, ...request.stages.map((one) => one.start_ms + one.ms));

function bars(request, stages) {
  const all = span(request);
  return stages.map((one) => {
    const bar = h("span", { class: `bar stage-${one.stage}`, title: `${stageName(one.stage)} ${ms(one.ms)}` });
    bar.style.left = `${(100 * Math.max(0, one.start_ms)) / all}%`;
    bar.style.width = `max(1px, ${(100 * one.ms) / all}%)`;
    return bar;
  });
}

function marks(request) {
  const found = request.failovers.map((again) => ["again", again.at_ms, `sent again: ${again.reason}`]);
  if (request.first_token_ms !== null) found.push(["first", request.first_token_ms, `first token ${ms(request.first_token_ms)}`]);
  return found.map(([kind, at, title]) => {
    const mark = h("span", { class: `mark ${kind}`, title });
    mark.style.left = `${Math.min(100, (100 * at) / span(request))}%`;
    return mark;
  });
}

function detailsOf(request, goTo) {
  const lanes = lanesOf(request).map((lane) => h("div", { class: "gantt-row" },
    h("span", { class: "gantt-name", text: lane.worker ? workerName(lane.worker) : "router" }),
    h("span", { class: "gantt-lane" }, ...bars(request, lane.stages), ...marks(request))));
  const rows = request.stages.map((one) => h("tr", {}, h("th", { scope: "row" }, h("span", { class: `swatch stage-${one.stage}` }), stageName(one.stage)), h("td", { text: one.worker || "router" }),
    h("td", { class: "num", text: ms(one.start_ms) }), h("td", { class: "num", text: ms(one.ms) })));
  const head = h("tr", {}, ...["Stage", "Worker", "Began after", "Took"].map((text, at) => h("th", { scope: "col", class: at > 1 ? "num" : "", text })));
  const table = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Stages of ${request.id}` }, h("table", {}, h("thead", {}, head), h("tbody", {}, ...rows)));
  const again = request.failovers.map((one) => h("p", { class: "problem", text: `Sent again after ${ms(one.at_ms)}: ${one.reason}` }));
  return [h("div", { class: "gantt", "aria-hidden": "true" }, ...lanes), ...again, familyOf(request, goTo), table, factsOf(request)].filter(Boolean);
}

function familyOf(request, goTo) {
  if (!request.parent && !request.children.length) return null;
  const link = (name) => h("button", { type: "button", class: "link", text: name, onclick: (event) => { if (!goTo(name)) event.target.title = "not among the requests shown"; } });
  const lines = [];
  if (request.parent) lines.push(h("p", { class: "parent" }, "Continues from ", link(request.parent)));
  if (request.children.length) lines.push(h("p", { class: "children" }, "Continued by ", ...request.children.flatMap((child, at) => (at ? [", ", link(child)] : [link(child)]))));
  return h("div", { class: "relatives" }, ...lines);
}

function factsOf(request) {
  const facts = [["Arrived", new Date(request.arrived_at * 1000).toLocaleTimeString()], ["Answer", request.answer_id], ["Transfer", request.transfer_id], ["Trace", request.trace_id]];
  const clocks = Object.entries(request.clocks).map(([worker, clock]) => `${workerName(worker)} ${clock.offset_ms < 0 ? "−" : "+"}${ms(Math.abs(clock.offset_ms))} (±${ms(clock.error_ms)})`);
  if (clocks.length) facts.push(["Clocks", clocks.join(", ")]);
  return h("dl", { class: "facts" }, ...facts.filter(([, value]) => value).map(([title, value]) => h("div", {}, h("dt", { text: title }), h("dd", { text: value }))));
}
