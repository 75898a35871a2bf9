// The API page: made from the server's own OpenAPI description, with a form to try each endpoint.

import { byId, h } from "./dom.js";
import { askForKey, openGate, startGate } from "./gate.js";
import { ask } from "./server.js";
import { startTheme } from "./theme.js";

const EXAMPLES = {
  "/v1/chat/completions": { messages: [{ role: "user", content: "What is the capital of France?" }], max_tokens: 32, stream: true },
  "/v1/completions": { prompt: "The capital of France is", max_tokens: 16, temperature: 0 },
  "/v1/responses": { input: "What is the capital of France?", max_output_tokens: 32 },
  "/v1/messages": { messages: [{ role: "user", content: "What is the capital of France?" }], max_tokens: 32 },
  "/tokenize": { prompt: "Hello world", return_token_strs: true },
  "/detokenize": { tokens: [1, 2, 3] },
};

startTheme();
startGate();
async function description() {
  for (;;) {
    try {
      return await (await ask("openapi.json")).json();
    } catch (error) {
      if (error.status !== 401) throw error;
      await askForKey();
    }
  }
}

function show(api) {
  openGate();
  byId("status").textContent = `version ${api.info.version}`;
  for (const [path, methods] of Object.entries(api.paths)) for (const [method, operation] of Object.entries(methods)) {
    const inside = h("div", { class: "inside" });
    const summary = h("summary", {}, h("span", { class: `method ${method}`, text: method.toUpperCase() }), h("code", { text: path }), ` ${operation.summary}`);
    const entry = h("details", {}, summary, inside);
    entry.addEventListener("toggle", () => {
      if (operation.requestBody) inside.append(fields(follow(api, operation.requestBody.content["application/json"].schema), path));
      if (!path.includes("{")) attempt(path, method, inside);
    }, { once: true });
    byId("paths").append(entry);
  }
}

const follow = (api, schema) => (schema.$ref ? api.components.schemas[schema.$ref.split("/").pop()] : schema);

function typeOf(schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) return schema.anyOf.map(typeOf).join(" | ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (schema.type === "array") return `list of ${typeOf(schema.items || {})}`;
  return schema.type || "anything";
}

function fields(schema, path) {
  const rows = Object.entries(schema.properties || {}).map(([name, field]) => {
    const needed = (schema.required || []).includes(name) ? " *" : "", type = typeOf(field);
    return h("tr", {}, h("th", { scope: "row" }, h("code", { text: name + needed })), h("td", {}, h("code", { text: type === "null" ? "not supported" : type })));
  });
  const head = h("tr", {}, h("th", { scope: "col", text: "Field (* needed)" }), h("th", { scope: "col", text: "Type" }));
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Fields of ${path}` }, h("table", {}, h("thead", {}, head), h("tbody", {}, ...rows)));
}

function attempt(path, method, inside) {
  const body = method === "post" ? h("textarea", { "aria-label": `Body for ${path}`, spellcheck: "false" }) : null;
  const output = h("pre", { hidden: true, tabindex: "0", "aria-label": `Answer of ${path}` });
  const button = h("button", { type: "button", text: "Try it", "aria-label": `Try ${method.toUpperCase()} ${path}` });
  if (body) { body.value = JSON.stringify(EXAMPLES[path] || {}, null, 2); inside.append(body); }
  inside.append(button, output);
  button.addEventListener("click", async () => {
    output.hidden = false;
    output.textContent = "";
    try {
      const answer = await ask(path.slice(1), { method: method.toUpperCase(), body: body ? JSON.parse(body.value) : undefined });
      output.textContent = `${answer.status}\n`;
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let part = await reader.read(); !part.done; part = await reader.read()) output.textContent += part.value;
    } catch (error) { output.textContent += `${error.status || ""} ${error.message}`; }
  });
}

show(await description());
