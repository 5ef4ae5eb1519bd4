// Asks the gateway. Owns the one shape of errors, and the header that no form can send. Who asks is
// known by a cookie that scripts can't read; nothing of a key is kept here.

const TIMEOUT_MS = 10000;

/** The gateway's own answer that something can't be done. retryS: seconds to wait, or null. */
export class Refusal extends Error {
  constructor(status, message, retryS) {
    super(message);
    this.status = status;
    this.retryS = retryS;
  }
}

let tellOver = () => {};

/** told() is called when the gateway no longer knows who asks. */
export function onSessionOver(told) {
  tellOver = told;
}

/** What the gateway answers, as a value. Throws Refusal, or what fetch throws where nobody answers. */
export async function ask(path, options) {
  try {
    return await askAnyway(path, options);
  } catch (error) {
    if (error instanceof Refusal && error.status === 401) tellOver();
    throw error;
  }
}

/** The same where a 401 is an answer like others. */
export async function askAnyway(path, { method = "GET", body } = {}) {
  const signal = AbortSignal.timeout(TIMEOUT_MS);
  const headers = method === "GET" ? {} : { "Content-Type": "application/json", "X-CSRF": "1" };
  const text = method === "GET" ? undefined : JSON.stringify(body ?? {});
  const reply = await fetch(path, { method, headers, body: text, signal, credentials: "same-origin" });
  if (!reply.ok) throw await refusalOf(reply);
  return reply.status === 204 ? null : reply.json();
}

/** What went wrong, for a person. */
export function explain(error) {
  if (error instanceof Refusal) return error.message;
  if (error.name === "TimeoutError") return "the gateway did not answer in time";
  return "the gateway can't be reached";
}

async function refusalOf(reply) {
  const told = await reply.json().catch(() => null);
  const message = told?.error?.message ?? `the gateway answered with status ${reply.status}`;
  const retry = Number(reply.headers.get("Retry-After") ?? NaN);
  return new Refusal(reply.status, message, Number.isFinite(retry) ? retry : null);
}

/** path with those of the values that are there. */
export function withQuery(path, values) {
  const given = Object.entries(values).filter(([, value]) => value !== null && value !== "");
  const query = new URLSearchParams(given).toString();
  return query ? `${path}?${query}` : path;
}

/** load(), one at a time: a call while it runs has it run once more, and waits for that. */
export function serially(load) {
  let running = null;
  let next = null;
  function start() {
    next = null;
    running = load().finally(() => {
      if (!next) running = null;
    });
    return running;
  }
  return () => {
    if (!running) return start();
    next ??= running.then(start);
    return next;
  };
}
