// Models & context: a row for each model of one worker, which opens on what is known of it.

import { byId, setText } from "./dom.js";
import { count, joined, sentence } from "./format.js";
import { draftOf, makeModelRow, sizeOf, updateModelRow } from "./modelrow.js";
import { makeRows } from "./rows.js";
import { speculationOf } from "./speculation.js";

const showRows = makeRows(byId("models"), (id) => makeModelRow(id), update);

export function showModels(worker) {
  showRows(worker.models);
  byId("no-models").hidden = worker.models.length > 0;
  const none = worker.connected ? "It has no model." : "It has not said yet which models it has.";
  setText(byId("no-models"), none);
}

/** So that another worker's rows begin closed. */
export function forgetModels() {
  showRows([]);
}

function update(row, model) {
  const context = joined`${count(model.context_tokens)} tokens of context`;
  const about = [model.is_loaded ? "Loaded" : "Not loaded", context];
  updateModelRow(row, { about, line: model.speculation, facts: factsOf(model) });
}

function factsOf(model) {
  return [
    ["Context", joined`${count(model.context_tokens)} tokens`],
    ["Model", sizeOf(model, model.model_bytes)],
    ["Draft", draftOf(model)],
    ...speculationOf(model),
    ["Draft problem", sentence(model.draft_problem)],
  ];
}
