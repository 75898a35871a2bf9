// A card for each worker, with what an operator can order it to do.

import { announce, byId, bytes, h, keyed, ms, rate, setAttribute, setText, short } from "./dom.js";
import { ask, getAdminKey, setAdminKey } from "./server.js";

export const KINDS = [
  ["in_use", "in use"], ["reserved", "reserved"], ["sending", "sending"], ["pinned", "kept"], ["quarantined", "quarantined"], ["cached", "cached"], ["free", "free"],
];
const ROLES = ["prefill", "decode", "whole", "encode"];

export class Workers {
  constructor() {
    this.cards = new Map();
    byId("legend").append(...KINDS.map(([kind, title]) => h("li", {}, h("span", { class: `swatch ${kind}` }), title)));
    this.states = new Map();
  }

  show(history, takesImages) {
    const workers = history.workers();
    const wanted = new Map(workers.map((worker) => [worker.id, worker]));
    keyed(byId("workers"), this.cards, wanted, (worker) => createCard(worker, takesImages), (card, worker) => updateCard(card, worker, history));
    for (const worker of workers) {
      const before = this.states.get(worker.id);
      if (before && before !== worker.state) announce(`${worker.id} is ${worker.state}`);
      this.states.set(worker.id, worker.state);
    }
  }
}

function createCard(worker, takesImages) {
  const state = h("span", { class: "state" }), problem = h("p", { class: "problem" });
  const bar = h("div", { class: "blocks", role: "img" }, ...KINDS.map(([kind]) => h("span", { class: kind })));
  const facts = h("dl", { class: "facts" });
  const role = h("select", { "aria-label": `New role of ${worker.id}` }, ...ROLES.filter((name) => name !== worker.role && (name !== "encode" || takesImages)).map((name) => h("option", { value: name, text: name })));
  const drain = h("button", { type: "button", class: "quiet", text: "Drain", "aria-label": `Drain ${worker.id}`, onclick: () => order(worker.id) });
  const change = h("button", { type: "button", class: "quiet", text: "Change role", "aria-label": `Change the role of ${worker.id}`, onclick: () => order(worker.id, role.value) });
  const actions = h("details", { class: "actions" }, h("summary", { text: "Manage" }), h("div", { class: "line" }, drain, h("span", { class: "pair" }, role, change)));
  const node = h("li", { class: "card", "data-worker": worker.id },
    h("div", { class: "title" }, h("span", { class: `badge ${worker.role}`, text: worker.role }), state, h("h3", { text: worker.id })),
    problem, bar, facts, actions);
  return { node, state, problem, bar, facts, actions, values: new Map() };
}

function updateCard(card, worker, history) {
  setAttribute(card.node, "class", `card ${worker.state}`);
  setText(card.state, worker.state);
  setAttribute(card.state, "class", `state ${worker.state}`);
  setText(card.problem, worker.problem && worker.state !== "ready" ? worker.problem : "");
  const { blocks } = worker;
  KINDS.forEach(([kind], index) => { card.bar.children[index].style.width = blocks.total ? `${(100 * blocks[kind]) / blocks.total}%` : "0"; });
  const held = KINDS.filter(([kind]) => blocks[kind]).map(([kind, title]) => `${blocks[kind]} ${title}`);
  setAttribute(card.bar, "aria-label", blocks.total ? `KV blocks: ${held.join(", ")}, of ${blocks.total}` : "It has no KV blocks");
  card.bar.hidden = !blocks.total;
  card.actions.hidden = worker.state !== "ready";
  const facts = new Map(factsOf(worker, history));
  keyed(card.facts, card.values, facts, (_, title) => {
    const value = h("dd");
    return { node: h("div", {}, h("dt", { text: title }), value), value };
  }, ({ value }, text) => setText(value, text));
}

function factsOf(worker, history) {
  const moved = history.perSecond(worker, (one) => one.transfers.bytes);
  const facts = [
    ["Queue", worker.waiting],
    ["Batch", worker.role === "encode" ? worker.transferring : `${worker.running} of ${worker.max_batch}`],
  ];
  if (worker.role === "encode") facts.push(["Images/s", short(history.perSecond(worker, (one) => one.images.encoded))], ["Encoded", worker.images.encoded]);
  else {
    facts.push(["Tokens/s", short(history.perSecond(worker, (one) => one.output_tokens))]);
    facts.push(["Prompt tok/s", short(history.perSecond(worker, (one) => one.prompt_tokens))]);
    facts.push(["KV blocks", `${worker.blocks.total - worker.blocks.free - worker.blocks.cached} of ${worker.blocks.total}`]);
  }
  if (worker.role !== "whole") facts.push(["Transfers", `${worker.transfers.in_flight} now, ${worker.transfers.done} done${worker.transfers.failed ? `, ${worker.transfers.failed} failed` : ""}`]);
  if (worker.transfers.bytes) facts.push(["Moved", moved > 0 ? rate(moved) : bytes(worker.transfers.bytes)]);
  if (worker.swapped) facts.push(["Swapped", worker.swapped]);
  if (worker.kept_kv) facts.push(["Kept KV", worker.kept_kv]);
  facts.push(["Device", worker.device], ["Process", `${worker.host}, ${worker.pid}`]);
  return facts;
}

async function order(worker, role) {
  const [title, text, yes] = role
    ? [`Change ${worker} to ${role}?`, "It finishes what it has, leaves, and comes back in the new role.", "Change role"]
    : [`Drain ${worker}?`, "It takes nothing new, finishes what it has, and leaves for good.", "Drain"];
  if (!(await confirmed(title, text, yes))) return;
  try {
    const answer = await (role ? give("admin/role", { worker, role }) : give("admin/drain", { worker }));
    announce(answer.warning ? `${worker} drains: ${answer.warning}` : `${worker} drains`);
  } catch (error) {
    await confirmed("The order was refused", error.message, "Close");
  }
}

// An admin key is asked for when the server says that the order needs one, and kept in this tab.
async function give(path, body) {
  try {
    return await (await ask(path, { method: "POST", body, key: getAdminKey() })).json();
  } catch (error) {
    if (error.status !== 401 && error.code !== "not_an_admin_key") throw error;
    if (!(await confirmed("This order needs an admin key", error.message, "Give the order", true))) throw error;
    setAdminKey(byId("ask-key").value.trim());
    return give(path, body);
  }
}

function confirmed(title, text, yes, needsKey = false) {
  const dialog = byId("ask");
  byId("ask-key").value = "";
  byId("ask-key").parentElement.hidden = !needsKey;
  byId("ask-title").textContent = title;
  byId("ask-text").textContent = text;
  byId("ask-yes").textContent = yes;
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true }));
}
