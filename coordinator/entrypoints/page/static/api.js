// Calls to the coordinator that served the page. The credential stays in this tab.

const STORED = "splitserve-key";
const TIMEOUT_MS = 10000;

export function hasKey() {
  return sessionStorage.getItem(STORED) !== null;
}

export function setKey(key) {
  if (key) sessionStorage.setItem(STORED, key);
  else sessionStorage.removeItem(STORED);
}

export async function getJson(path) {
  const response = await call(path, { signal: AbortSignal.timeout(TIMEOUT_MS) });
  return response.json();
}

// Streams the events of a chat completion to `onEvent`; `signal` ends it.
export async function chat(body, requestId, signal, onEvent) {
  const headers = { "content-type": "application/json", "x-request-id": requestId };
  const response = await call("v1/chat/completions", {
    method: "POST",
    headers,
    body: JSON.stringify(body),
    signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (text + value).split("\n\n");
    text = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data && data !== "[DONE]") onEvent(JSON.parse(data));
    }
  }
}

async function call(path, options) {
  const key = sessionStorage.getItem(STORED);
  const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
  const response = await fetch(path, { ...options, headers, cache: "no-store" });
  if (!response.ok) throw new Error(await reason(response));
  return response;
}

async function reason(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `status ${response.status}`;
  }
}
