// Everything that the page asks of the server goes through here, with the API key if there is one; orders with the admin key.

const KEY = "kvrelay-key", ADMIN_KEY = "kvrelay-admin-key";
const keep = (name, key) => (key ? sessionStorage.setItem(name, key) : sessionStorage.removeItem(name));
export const getKey = () => sessionStorage.getItem(KEY) || "";
export const setKey = (key) => keep(KEY, key);
export const getAdminKey = () => sessionStorage.getItem(ADMIN_KEY) || getKey();
export const setAdminKey = (key) => keep(ADMIN_KEY, key);

export class Refused extends Error {
  constructor(status, { message, code }) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export async function ask(path, { method = "GET", body, signal, key = getKey() } = {}) {
  const headers = {};
  if (key) headers.authorization = `Bearer ${key}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const answer = await fetch(path, { method, headers, signal, cache: "no-store", body: body === undefined ? undefined : JSON.stringify(body) });
  if (!answer.ok) throw new Refused(answer.status, await problem(answer));
  return answer;
}

async function problem(answer) {
  try {
    return (await answer.json()).error;
  } catch {
    return { message: `the server answered ${answer.status}` };
  }
}

// The events of an answer: [name, data] each. EventSource cannot send a key, so this reads the stream itself.
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const pieces = (rest + part.value).split("\n\n");
    rest = pieces.pop();
    for (const piece of pieces) {
      let name = "message";
      const data = [];
      for (const line of piece.split("\n")) {
        if (line.startsWith("event: ")) name = line.slice(7);
        else if (line.startsWith("data: ")) data.push(line.slice(6));
      }
      yield [name, data.join("\n")];
    }
  }
}
