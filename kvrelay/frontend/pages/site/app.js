// The dashboard: one feed, and the parts of the page that show it.

import { Charts } from "./charts.js";
import { Chat } from "./chat.js";
import { byId, setText } from "./dom.js";
import { askForKey, openGate, startGate } from "./gate.js";
import { History } from "./history.js";
import { ClusterMap } from "./map.js";
import { Requests } from "./requests.js";
import { ask, events } from "./server.js";
import { startTheme } from "./theme.js";
import { Workers } from "./workers.js";

const AGAIN_MS = [500, 1000, 2000, 5000];

startTheme();
startGate();
const history = new History();
const map = new ClusterMap(), workers = new Workers(), charts = new Charts(), requests = new Requests(), chat = new Chat(requests);
let about = null;

const TAKES = {
  hello(data) {
    about = data;
    chat.meet(data);
    requests.restart();
    openGate();
  },
  tick(data) {
    history.take(data);
    const { cluster } = data, ready = cluster.workers.filter((worker) => worker.state === "ready").length;
    setText(byId("status"), `${cluster.model}: ${cluster.ready ? "" : "not ready, "}${ready} of ${cluster.workers.length} workers ready, version ${about.version}`);
    byId("status").className = cluster.ready ? "status good" : "status bad";
    if (document.hidden) return;
    map.show(history);
    workers.show(history, about.takes_images);
    charts.show(history);
  },
  requests(data) { requests.take(data); },
};

async function follow() {
  for (let tries = 0; ; tries += 1) {
    try {
      for await (const [name, data] of events(await ask("feed"))) {
        TAKES[name](JSON.parse(data));
        tries = 0;
      }
      continue; // the server ends a feed now and then, to check the key again
    } catch (error) {
      if (error.status === 401) {
        await askForKey();
        continue;
      }
      console.warn(error);
    }
    setText(byId("status"), "the server does not answer; trying again");
    byId("status").className = "status bad";
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS[Math.min(tries, AGAIN_MS.length - 1)]));
  }
}

follow();
