// Models & context: a row for each model, which opens on what is known of it.

import { byId, element, setText } from "./dom.js";
import { bytes, count, counted, joined, sentence } from "./format.js";
import { pulled } from "./library.js";
import { draftOf, makeModelRow, sizeOf, updateModelRow } from "./modelrow.js";
import { removeButton } from "./remove.js";
import { makeRows } from "./rows.js";
import { speculationOf } from "./speculation.js";

const showRows = makeRows(byId("models"), make, update);

export function showModels(models) {
  showRows(models);
  byId("no-models").hidden = models.length > 0;
  setText(byId("no-models"), "No model is configured.");
}

function make(id) {
  const actions = element("div", { class: "line" }, removeButton(id));
  return { ...makeModelRow(id, actions), actions };
}

function update(row, model) {
  const context = joined`${count(model.context_limit)} tokens of context`;
  const about = [model.is_loaded ? "Loaded" : "Not loaded", context];
  updateModelRow(row, { about, line: model.speculation, facts: factsOf(model) });
  row.actions.hidden = pulled(model.id) === undefined;
}

function factsOf(model) {
  return [
    ["Context", joined`${count(model.context_limit)} tokens`],
    ["Model", sizeOf(model, model.target_bytes)],
    ["Draft", draftOf(model)],
    ...speculationOf(model),
    ["Draft problem", sentence(model.draft_problem)],
    ...cacheOf(model.kv_prefix_cache ?? {}),
    ["Folder", model.path],
  ];
}

function cacheOf(cache) {
  return [
    ["Prefix cache hits", joined`${count(cache.hits)} of ${counted(cache.requests, "request")}`],
    ["Prefix cache saved", joined`${counted(cache.saved_tokens, "token")}, holding ${bytes(cache.bytes)}`],
  ];
}
