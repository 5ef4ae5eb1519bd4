// Which models are here, which are coming, which there could be: as the worker last listed them.
// Asked for every second while something comes, now and then else, and not while nobody looks.

import { Refusal, ask, explain } from "./api.js";
import { byId, setText } from "./dom.js";
import { ended } from "./format.js";

export const PATH = "/api/models";
const BUSY_MS = 1000;
const IDLE_MS = 10000; // another program may download, too
const listeners = [];
let last = { models: [], catalogue: [], pulls: [], disk: {} };
let timer = 0;
let nAsked = 0;

/** tell(library): now and then, at least whenever it has changed. */
export function onLibrary(tell) {
  listeners.push(tell);
}

/** Asks anew. Where nobody answers, whoever watches the worker asks again once it does. */
export async function loadLibrary() {
  clearTimeout(timer);
  const turn = (nAsked += 1);
  const found = await ask(PATH).catch((error) => error);
  if (turn !== nAsked) return;
  if (found instanceof Error) return showTrouble(found);
  last = found;
  setText(byId("models-error"), "");
  for (const tell of listeners) tell(last);
  goOn(isBusy() ? BUSY_MS : IDLE_MS);
}

/** Nothing of what only the watch over the worker can mend: it is gone, or wants a key. */
function showTrouble(error) {
  if (!(error instanceof Refusal) || error.needsKey) return;
  setText(byId("models-error"), ended(explain(error)));
  goOn(IDLE_MS);
}

function goOn(afterMs) {
  if (!document.hidden) timer = setTimeout(loadLibrary, afterMs);
}

/** The model as it was listed; undefined for what was not downloaded. */
export function pulled(id) {
  return last.models.find((model) => model.id === id);
}

export function library() {
  return last;
}

function isBusy() {
  const isComing = (model) => ["downloading", "updating"].includes(model.state);
  return last.pulls.some((pull) => pull.state === "running") || last.models.some(isComing);
}
