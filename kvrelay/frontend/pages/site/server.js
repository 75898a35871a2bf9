// Everything that the page asks of the server goes through here, with the API key if there is one.

const KEY = "kvrelay-key";
export const getKey = () => sessionStorage.getItem(KEY) || "";
export const setKey = (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY));

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export async function ask(path, { method = "GET", body, signal } = {}) {
  const headers = {};
  if (getKey()) headers.authorization = `Bearer ${getKey()}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const answer = await fetch(path, { method, headers, signal, cache: "no-store", body: body === undefined ? undefined : JSON.stringify(body) });
  if (!answer.ok) throw new Refused(answer.status, await problem(answer));
  return answer;
}

async function problem(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `the server answered ${answer.status}`;
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
