// Asks the worker. Owns the key, the one shape of errors, and how a stream is read.

const KEY = "mlx-worker-key";
const TIMEOUT_MS = 5000;
const SENDABLE = /^[\x21-\x7e]+$/; // what a header can carry, and what a worker takes as a key

/** The worker's own answer that something can't be done; status: of HTTP, 0 in a stream. */
export class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }

  get needsKey() {
    return this.status === 401;
  }
}

export function hasKey() {
  return sessionStorage.getItem(KEY) !== null;
}

/** Whether it can be a key at all; kept for this tab alone. */
export function keepKey(key) {
  if (!SENDABLE.test(key)) return false;
  sessionStorage.setItem(KEY, key);
  return true;
}

export function forgetKey() {
  sessionStorage.removeItem(KEY);
}

/** What the worker answers, as a value. Throws Refusal, or what fetch throws where nobody answers. */
export async function ask(path, { method = "GET", body, timeoutMs = TIMEOUT_MS } = {}) {
  const reply = await send(path, method, body, AbortSignal.timeout(timeoutMs));
  return reply.json();
}

/** The first value of a stream, which is then left. Throws as ask does. */
export async function askForFirst(path, body) {
  const leaving = new AbortController();
  try {
    for await (const value of askForStream(path, body, leaving.signal)) return value;
  } finally {
    leaving.abort();
  }
}

/** The values of a stream of server-sent events, to [DONE]. Throws as ask does. */
export async function* askForStream(path, body, signal) {
  const reply = await send(path, "POST", body, signal);
  for await (const data of eventsOf(reply.body)) {
    if (data === "[DONE]") return;
    const value = JSON.parse(data);
    if (value.error) throw new Refusal(0, value.error.message);
    yield value;
  }
  throw new Refusal(0, "the reply broke off");
}

/** What went wrong, for a person. */
export function explain(error) {
  if (error instanceof Refusal) return error.message;
  if (error.name === "TimeoutError") return "the worker did not answer in time";
  return "the worker can't be reached";
}

async function send(path, method, body, signal) {
  const text = body === undefined ? undefined : JSON.stringify(body);
  const reply = await fetch(path, { method, signal, body: text, headers: headers(text) });
  if (!reply.ok) throw new Refusal(reply.status, await messageOf(reply));
  return reply;
}

function headers(text) {
  const key = sessionStorage.getItem(KEY);
  return {
    ...(key === null ? {} : { Authorization: `Bearer ${key}` }),
    ...(text === undefined ? {} : { "Content-Type": "application/json" }),
  };
}

async function messageOf(reply) {
  const told = await reply.json().catch(() => null);
  return told?.error?.message ?? `the worker answered with status ${reply.status}`;
}

async function* eventsOf(stream) {
  let rest = "";
  for await (const text of textsOf(stream)) {
    const events = (rest + text).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (event.startsWith("data: ")) yield event.slice("data: ".length);
    }
  }
}

async function* textsOf(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    yield value;
  }
}
