// Asking the server: with the reader's key, errors as exceptions, and streams of server-sent events.
// (EventSource can send neither a key nor a body.) Paths are relative, so that the page works under any root path.

const KEY = "jpaged-key";

export class RequestFailed extends Error {
  constructor(message, status, code = null) {
    super(message);
    this.status = status;
    this.code = code; // a word for programs, as the server's errors have it
  }
}

export function apiKey() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function setApiKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

// A response of status 200; anything else throws RequestFailed, or AbortError when `signal` says stop.
export async function request(path, { body, signal } = {}) {
  const headers = {};
  if (apiKey()) headers.authorization = `Bearer ${encodeKey(apiKey())}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
      credentials: "same-origin",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new RequestFailed("The server cannot be reached.", 0);
  }
  if (!response.ok) throw await failure(response);
  return response;
}

// The data of each event of a response, parsed; it ends with "[DONE]" or with the stream. An error event throws.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (text + value).split("\n\n");
      text = parts.pop();
      for (const part of parts) {
        const data = part.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
        if (data === "[DONE]") return;
        if (!data) continue;
        const event = JSON.parse(data);
        if (event.error) throw new RequestFailed(event.error.message, 200);
        yield event;
      }
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof RequestFailed) throw error;
    throw new RequestFailed("The connection to the server broke off.", 0);
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function failure(response) {
  let error = { message: `The server answered ${response.status}.` };
  try {
    error = (await response.json()).error ?? error;
  } catch {
    // a proxy's answer, perhaps: the status has to do
  }
  return new RequestFailed(error.message, response.status, error.code);
}

// Headers take bytes; a key may have any characters.
function encodeKey(key) {
  return String.fromCharCode(...new TextEncoder().encode(key));
}
