// The server's interface: requests with the key, errors with a meaning, streams of server-sent events.

const KEY = "quire.key";
const ROOT = new URL("../../", import.meta.url); // where the server's paths begin: a proxy may put them below its own

/** The address of a path of the server, "/health". */
export function address(path) {
  return new URL(path.slice(1), ROOT);
}

/** The API key that the user gave, or "". */
export function apiKey() {
  try {
    return sessionStorage.getItem(KEY) || localStorage.getItem(KEY) || "";
  } catch {
    return "";
  }
}

/** Keep the key for this tab, or for this browser. An empty one forgets it. */
export function setApiKey(key, remember) {
  try {
    sessionStorage.removeItem(KEY);
    localStorage.removeItem(KEY);
    if (key) (remember ? localStorage : sessionStorage).setItem(KEY, key);
  } catch {
    // storage is off: nothing can be kept
  }
}

/**
 * An answer that is an error, or none at all (status 0: the server could not be reached, or went away; null: nothing
 * was sent). `param` is the field of the request that is to blame.
 */
export class ServerError extends Error {
  constructor(status, message, { code = null, param = null, retryAfter = null, label = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.param = param;
    this.retryAfter = retryAfter;
    this.label = label;
  }
}

async function failure(response) {
  let error = {};
  try {
    error = (await response.json()).error || {};
  } catch {
    // not from Quire: a proxy's page, say
  }
  return new ServerError(response.status, error.message || `the server answered ${response.status}`, {
    code: error.code || null,
    param: error.param || null,
    retryAfter: Number(response.headers.get("retry-after")) || null,
    label: response.headers.get("x-request-id"),
  });
}

/** Send a request; a body makes it a POST of JSON. Throws ServerError, or AbortError if `signal` fired. */
export async function send(path, { body, signal } = {}) {
  const headers = {};
  const key = apiKey();
  if (key) headers.authorization = `Bearer ${key}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const options = { headers, signal, cache: "no-store" };
  if (body !== undefined) Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  let response;
  try {
    response = await fetch(address(path), options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(0, "The server cannot be reached.");
  }
  if (response.ok) return response;
  const error = await failure(response);
  if (response.status === 401 && key !== apiKey()) return send(path, { body, signal }); // a new key came meanwhile
  throw error;
}

export async function getJson(path, signal) {
  return (await send(path, { signal })).json();
}

/** What /health says, whatever its status code; null if nobody answers. */
export async function health() {
  try {
    const response = await fetch(address("/health"), { cache: "no-store" });
    return await response.json();
  } catch {
    return null;
  }
}

/** Splits a stream of text into the `data` of server-sent events. */
export class EventParser {
  constructor() {
    this.rest = "";
    this.data = [];
  }

  /** Returns the events that `text` completes. */
  push(text) {
    const events = [];
    const lines = (this.rest + text).split("\n");
    this.rest = lines.pop();
    for (const raw of lines) {
      const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
      if (line === "") {
        if (this.data.length) events.push(this.data.join("\n"));
        this.data = [];
      } else if (line.startsWith("data:")) {
        this.data.push(line.slice(line[5] === " " ? 6 : 5));
      } // else a comment (the server is alive) or a field that we do not need
    }
    return events;
  }
}

/**
 * POST `body` and hand each chunk of the answer to `onChunk`. Returns the response's headers.
 * Throws ServerError also for an error inside the stream, and for a stream that breaks off.
 */
export async function stream(path, body, signal, onChunk) {
  const response = await send(path, { body, signal });
  const label = response.headers.get("x-request-id");
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const parser = new EventParser();
  const lost = (error) => {
    if (error.name === "AbortError") throw error;
    throw new ServerError(0, "The connection to the server was lost.", { label });
  };
  try {
    for (;;) {
      const part = await reader.read().catch(lost);
      if (part.done) throw new ServerError(0, "The server went away before the answer was complete.", { label });
      for (const data of parser.push(part.value)) {
        if (data === "[DONE]") return response.headers;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new ServerError(500, chunk.error.message, { code: chunk.error.code, param: chunk.error.param ?? null, label });
        onChunk(chunk);
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // whatever is still to come, nobody reads it
  }
}
