// Asks for an API key and waits until it is given. Nothing else is shown meanwhile.

import { byId, h } from "./dom.js";
import { getKey, setAdminKey, setKey } from "./server.js";

function makeGate() {
  const key = h("input", { id: "gate-key", type: "password", autocomplete: "current-password", required: true });
  const form = h("form", { id: "gate-form" },
    h("label", { for: "gate-key", text: "API key" }),
    h("div", { class: "line" }, key, h("button", { type: "submit", text: "Open" })),
    h("p", { id: "gate-problem", class: "problem", role: "alert" }),
    h("p", { class: "soft", text: "It is kept in this tab only, and goes nowhere but to this server." }));
  const title = h("h1", { id: "gate-title", text: "This server asks for an API key" });
  byId("content").before(h("section", { id: "gate", "aria-labelledby": "gate-title" }, title, form));
}

export function askForKey() {
  byId("content").hidden = true;
  byId("key-button").hidden = true;
  if (!byId("gate")) makeGate();
  byId("gate-problem").textContent = getKey() ? "The server does not know this key." : "";
  byId("gate-key").focus();
  return new Promise((resolve) => {
    byId("gate-form").addEventListener("submit", (event) => {
      event.preventDefault();
      setKey(byId("gate-key").value.trim());
      byId("gate-key").value = "";
      resolve();
    }, { once: true });
  });
}

export function openGate() {
  byId("gate")?.remove();
  byId("content").hidden = false;
  byId("key-button").hidden = !getKey();
}

export function startGate() {
  byId("key-button").addEventListener("click", () => {
    setKey("");
    setAdminKey("");
    location.reload();
  });
}
