// The server's API as the page needs it: requests with a key, server-sent events, a completion that survives its
// connection. Knows nothing of the page but how to ask for a key.

const KEY = "gptserve-key"; // in sessionStorage: it goes with the tab
const RETRIES = 300; // a server loads its weights for minutes
const RETRY_MS = 1000;
const RESTARTS = 3; // more in a row mean that a balancer asks other servers for it
const GATEWAY_ERRORS = [502, 503, 504]; // a server that drains, or a proxy without one

export class ApiError extends Error {
  constructor(status, { message, code }) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

let asking = null; // one dialog, however many requests wait for a key

/** Send a request, with the key if there is one; `askKey` shows a dialog and returns a key. Throws ApiError. */
export async function send(path, { body, signal } = {}, askKey = defaultAskKey) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = body ? { "content-type": "application/json" } : {};
    if (key) headers.authorization = `Bearer ${key}`;
    const response = await fetch(path, {
      method: body ? "POST" : "GET",
      headers,
      body: body && JSON.stringify(body),
      signal,
    });
    if (response.status !== 401) {
      if (response.ok) return response;
      throw await errorOf(response);
    }
    if (sessionStorage.getItem(KEY) === key) {
      const { message } = await errorOf(response);
      asking ??= askKey(key ? message : "").finally(() => (asking = null));
      sessionStorage.setItem(KEY, await asking);
    }
  }
}

let defaultAskKey = () => Promise.reject(new Error("no key"));

/** Set what `send` asks for a key. It takes the server's complaint about the last one, and returns a promise. */
export function askForKeys(askKey) {
  defaultAskKey = askKey;
}

async function errorOf(response) {
  const text = await response.text();
  try {
    return new ApiError(response.status, JSON.parse(text).error);
  } catch {
    return new ApiError(response.status, { message: text || response.statusText, code: null });
  }
}

export async function post(path, body) {
  return (await send(path, { body })).json();
}

/** Yield the events of a response: { id, data }. */
async function* events(response) {
  if (response.status === 204) return;
  let rest = "";
  for await (const text of chunks(response.body.pipeThrough(new TextDecoderStream()))) {
    const blocks = (rest + text).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const event = { id: null, data: null };
      for (const line of block.split("\n")) {
        if (line.startsWith("id: ")) event.id = line.slice(4);
        if (line.startsWith("data: ")) event.data = line.slice(6);
      }
      if (event.data !== null) yield event;
    }
  }
}

async function* chunks(stream) {
  const reader = stream.getReader(); // not every browser iterates streams
  try {
    for (let part = await reader.read(); !part.done; part = await reader.read()) yield part.value;
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Begin a completion that outlives this page, and return what the server says of it: id, seed and so on. */
export async function begin(body, signal) {
  return (await send("v1/completions", { body: { ...body, background: true }, signal })).json();
}

/**
 * Yield the chunks of a completion from its first on. A stream that breaks is taken up after its last event.
 * `beginAgain` begins one that the server has lost, which is the same to the bit, and returns its id.
 */
export async function* follow(id, signal, beginAgain) {
  let [last, failures, restarts, isLost] = [null, 0, 0, false];
  for (;;) {
    try {
      if (isLost) id = await beginAgain();
      isLost = false;
      const after = last === null ? "" : `?starting_after=${last}`;
      const response = await send(`v1/completions/${id}/events${after}`, { signal });
      for await (const event of events(response)) {
        if (event.data === "[DONE]") return;
        const chunk = JSON.parse(event.data);
        if (chunk.error) throw new ApiError(0, chunk.error);
        failures = restarts = 0;
        last = event.id ?? last;
        yield chunk;
      }
      if (response.status === 204) return;
    } catch (error) {
      isLost ||= error.code === "completion_not_found" && ++restarts <= RESTARTS;
      const mayComeBack = isLost || error instanceof TypeError || GATEWAY_ERRORS.includes(error.status) || error.code === "draining";
      if (!mayComeBack || ++failures > RETRIES) throw error;
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

const texts = new Map();

/** Return the text of a token. */
export async function textOf(tokenId) {
  if (!texts.has(tokenId)) texts.set(tokenId, (await post("detokenize", { tokens: [tokenId] })).prompt);
  return texts.get(tokenId);
}
