// The workers of the organisation, as last heard. Views are told when they change.

import { ask, explain, serially } from "./api.js";

const PATH = "/api/v1/workers";
const listeners = [];
let found = null; // null: not heard yet

/** listener(workers, trouble); workers null: not heard yet. trouble: why they are old, or "". */
export function onFleet(listener) {
  listeners.push(listener);
}

export function fleet() {
  return found;
}

export function forgetFleet() {
  found = null;
}

export const loadFleet = serially(async () => {
  let trouble = "";
  try {
    found = (await ask(PATH)).data;
  } catch (error) {
    trouble = explain(error);
  }
  for (const listener of listeners) listener(found, trouble);
});

export function pathOf(id) {
  return `${PATH}/${encodeURIComponent(id)}`;
}

export function addWorker(name) {
  return ask(PATH, { method: "POST", body: { name } });
}

export function disableWorker(id) {
  return ask(pathOf(id), { method: "DELETE" });
}
