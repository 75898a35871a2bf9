// A conversation with the model. Under each answer: which workers did what, and how long it took.

import { announce, byId, h, ms, setText, short, workerName } from "./dom.js";
import { lanesOf } from "./requests.js";
import { ask, events } from "./server.js";

const WRITE_EVERY_MS = 40;
const LOOK_UP_AFTER_MS = 2500; // the feed tells every second
const value = (id) => byId(id).value.trim();
const isAtEnd = (log) => log.scrollHeight - log.scrollTop - log.clientHeight < 40;
const number = (id) => (value(id) === "" ? undefined : Number(value(id)));

function otherFields() {
  try {
    return JSON.parse(value("set-other") || "{}");
  } catch (error) {
    throw new Error(`Other fields of the request: ${error.message}`);
  }
}

export class Chat {
  constructor(requests) {
    this.requests = requests;
    this.messages = [];
    this.images = [];
    this.answers = []; // those that are shown
    this.running = null; // AbortController
    requests.listeners.push((changed) => this.hear(changed));
    byId("chat-form").addEventListener("submit", (event) => { event.preventDefault(); this.send(); });
    byId("chat-text").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); this.send(); }
    });
    byId("chat-stop").addEventListener("click", () => this.running && this.running.abort());
    byId("chat-new").addEventListener("click", () => this.restart());
    byId("chat-file").addEventListener("change", () => this.addImages());
  }

  meet({ models, takes_images: takesImages }) {
    byId("chat-image").hidden = !takesImages;
    const select = byId("set-model"), chosen = select.value;
    select.replaceChildren(...models.map((name) => h("option", { value: name, text: name })));
    if (models.includes(chosen)) select.value = chosen;
  }

  restart() {
    if (this.running) this.running.abort();
    this.messages = [];
    this.answers = [];
    byId("chat-log").replaceChildren();
    this.dropImages();
    byId("chat-text").focus();
  }

  async addImages() {
    for (const file of byId("chat-file").files) {
      const url = await new Promise((resolve) => {
        const reader = new FileReader();
        reader.addEventListener("load", () => resolve(reader.result));
        reader.readAsDataURL(file);
      });
      this.images.push({ url, name: file.name });
      const remove = h("button", { type: "button", class: "quiet", text: "Remove", "aria-label": `Remove ${file.name}` });
      const thumb = h("span", { class: "thumb" }, h("img", { src: url, alt: file.name }), remove);
      remove.addEventListener("click", () => { this.images = this.images.filter((image) => image.url !== url); thumb.remove(); });
      byId("chat-images").append(thumb);
    }
    byId("chat-file").value = "";
  }

  dropImages() {
    this.images = [];
    byId("chat-images").replaceChildren();
  }

  send() {
    const text = value("chat-text");
    if (this.running || (!text && !this.images.length)) return;
    const images = this.images.map(({ url }) => ({ type: "image_url", image_url: { url } }));
    const content = images.length ? [...images, { type: "text", text }] : text;
    const turn = h("div", { class: "turn user" }, h("h3", { text: "You" }), ...this.images.map(({ url, name }) => h("img", { src: url, alt: name })), h("p", { text }));
    byId("chat-log").append(turn);
    byId("chat-text").value = "";
    this.dropImages();
    this.messages.push({ role: "user", content });
    const system = value("set-system");
    const answer = this.newAnswer();
    this.generate(answer, { messages: system ? [{ role: "system", content: system }, ...this.messages] : this.messages });
  }

  newAnswer() {
    const text = h("p", { class: "text" }), counts = h("p", { class: "counts" }), work = h("div", { class: "work" });
    const more = h("button", { type: "button", class: "quiet", text: "Continue", hidden: true });
    byId("chat-log").append(h("div", { class: "turn model" }, h("h3", { text: "Model" }), text, counts, work, more));
    const answer = { text, counts, work, more, ids: [], waiting: "", timer: 0, message: { role: "assistant", content: "" } };
    more.addEventListener("click", () => this.running || this.generate(answer, { continuation_of: answer.ids[answer.ids.length - 1] }));
    this.answers.push(answer);
    this.messages.push(answer.message);
    return answer;
  }

  settings() {
    return {
      model: value("set-model") || undefined, max_tokens: number("set-max"), temperature: number("set-temperature"), top_p: number("set-top-p"),
      seed: number("set-seed"), keep_kv: byId("set-keep").checked || undefined, stream: true, stream_options: { include_usage: true },
      ...otherFields(),
    };
  }

  async generate(answer, prompt) {
    this.running = new AbortController();
    byId("chat-stop").disabled = false;
    byId("chat-send").disabled = true;
    answer.more.hidden = true;
    const run = { began: performance.now(), first: 0, tokens: 0, usage: null, finish: "" };
    try {
      await this.read(answer, run, await ask("v1/chat/completions", { method: "POST", signal: this.running.signal, body: { ...this.settings(), ...prompt, messages: prompt.messages && prompt.messages.filter((one) => one !== answer.message) } }));
    } catch (error) {
      run.finish = error.name === "AbortError" ? "stopped" : "";
      if (!run.finish) answer.counts.before(h("p", { class: "problem", text: error.message }));
    }
    this.running = null;
    byId("chat-stop").disabled = true;
    byId("chat-send").disabled = false;
    answer.more.hidden = !(run.finish === "length" || run.finish === "stopped") || !answer.ids.length;
    this.write(answer, run);
    setTimeout(() => this.lookUp(answer).catch(console.warn), LOOK_UP_AFTER_MS);
    announce(run.finish === "stopped" ? "Stopped" : "The answer is complete");
  }

  async read(answer, run, response) {
    const took = ["encode", "prefill", "decode"].map((role) => [role, response.headers.get(`x-kvrelay-${role}`)]).filter(([, worker]) => worker);
    answer.work.replaceChildren(h("p", { text: took.map(([role, worker]) => `${role}: ${workerName(worker)}`).join(", ") }));
    for await (const [, data] of events(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      if (!answer.ids.includes(chunk.id)) answer.ids.push(chunk.id);
      if (chunk.usage) run.usage = chunk.usage;
      const [choice] = chunk.choices;
      if (!choice) continue;
      if (choice.finish_reason) run.finish = choice.finish_reason;
      const piece = (choice.delta && choice.delta.content) || "";
      if (!run.first) run.first = performance.now();
      run.tokens += choice.delta && "content" in choice.delta && !choice.finish_reason ? 1 : 0;
      answer.message.content += piece;
      answer.waiting += piece;
      if (!answer.timer) answer.timer = setTimeout(() => this.write(answer, run), WRITE_EVERY_MS);
    }
  }

  // Tokens come faster than anybody reads: they are written together.
  write(answer, run) {
    clearTimeout(answer.timer);
    answer.timer = 0;
    const log = byId("chat-log"), follows = isAtEnd(log);
    answer.text.append(answer.waiting);
    answer.waiting = "";
    this.count(answer, run, performance.now());
    if (follows) log.scrollTop = log.scrollHeight;
  }

  count(answer, run, now) {
    const { usage } = run;
    const tokens = usage ? `${usage.prompt_tokens} prompt + ${usage.completion_tokens} answer tokens` : `${run.tokens} tokens`;
    const cached = usage && usage.prompt_tokens_details && usage.prompt_tokens_details.cached_tokens;
    const after = run.first ? [`first after ${ms(run.first - run.began)}`] : [];
    const made = usage ? usage.completion_tokens : run.tokens;
    if (run.first && made > 1) after.push(`${short((made - 1) / Math.max(0.001, (now - run.first) / 1000))} tokens/s`);
    if (run.finish && run.finish !== "stop") after.push(run.finish === "length" ? "longest answer reached" : run.finish);
    setText(answer.counts, [tokens, cached ? `${cached} from cache` : "", ...after].filter(Boolean).join(", "));
  }

  // The feed tells what its own router served; behind the same port there may be others.
  async lookUp({ ids }) {
    for (const id of ids.filter((one) => !this.requests.find(one))) this.requests.take((await (await ask(`requests/${encodeURIComponent(id)}`)).json()).data);
  }

  // What the feed knows of the requests that made the answers.
  hear(changed) {
    const log = byId("chat-log"), follows = isAtEnd(log);
    for (const request of changed) {
      const answer = this.answers.find((one) => one.ids.includes(request.answer_id));
      const known = answer ? answer.ids.map((id) => this.requests.find(id)).filter(Boolean) : [];
      if (known.length && request.stages.length) answer.work.replaceChildren(...known.map(workOf));
    }
    if (follows) log.scrollTop = log.scrollHeight;
  }
}

function workOf(request) {
  const lanes = lanesOf(request).filter((lane) => lane.worker);
  const rows = lanes.map((lane) => h("li", {}, h("span", { class: `badge ${lane.role}`, text: lane.role }), h("span", { class: "id", text: ` ${workerName(lane.worker)}: ` }),
    ...lane.stages.flatMap((one, at) => [at ? " → " : "", h("span", { class: "stage-word" }, h("span", { class: `swatch stage-${one.stage}` }), `${one.stage.replace("_", "-")} ${ms(one.ms)}`)])));
  for (const again of request.failovers) rows.push(h("li", { class: "problem", text: `sent again: ${again.reason}` }));
  return h("ul", { "aria-label": "Which workers did what" }, ...rows);
}
