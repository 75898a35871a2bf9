// Asks for an API key and waits until it is given. Nothing else is shown meanwhile.

import { byId } from "./dom.js";
import { getKey, setKey } from "./server.js";

export function askForKey() {
  byId("content").hidden = true;
  byId("gate").hidden = false;
  byId("key-button").hidden = true;
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
  byId("gate").hidden = true;
  byId("content").hidden = false;
  byId("key-button").hidden = !getKey();
}

export function startGate() {
  byId("key-button").addEventListener("click", () => {
    setKey("");
    location.reload();
  });
}
