// Models & context: a row for each model, which opens on what is known of it.

import { byId, describe, drawAnew, element, setText } from "./dom.js";
import { bytes, change, count, counted, joined, ratio, sentence, share } from "./format.js";
import { pulled } from "./library.js";
import { removeButton } from "./remove.js";

const rows = new Map(); // id of a model → the nodes of its row
let lastNumber = 0;

export function showModels(models) {
  const ids = new Set(models.map((model) => model.id));
  for (const id of rows.keys()) if (!ids.has(id)) removeRow(id);
  models.forEach((model, place) => {
    const row = rows.get(model.id) ?? addRow(model.id);
    moveTo(row.item, place);
    update(row, model);
  });
  byId("no-models").hidden = models.length > 0;
  setText(byId("no-models"), "No model is configured.");
}

function addRow(id) {
  lastNumber += 1;
  const list = element("dl");
  const actions = element("div", { class: "line" }, removeButton(id));
  const panel = element("div", { id: `model-${lastNumber}`, hidden: "" }, list, actions);
  const name = element("span", { class: "name" }, id);
  const about = element("span", { class: "about" });
  const glance = element("span", { class: "glance" });
  const attributes = { type: "button", "aria-expanded": "false", "aria-controls": panel.id };
  const button = element("button", attributes, name, about, glance);
  button.addEventListener("click", () => toggle(button, panel));
  const item = element("li", { class: "model" }, element("h3", {}, button), panel);
  rows.set(id, { item, list, actions, about, glance });
  return rows.get(id);
}

function removeRow(id) {
  rows.get(id).item.remove();
  rows.delete(id);
}

/** A row that is in its place is left there: moving it would take the focus away. */
function moveTo(item, place) {
  const list = byId("models");
  if (list.children[place] !== item) list.insertBefore(item, list.children[place] ?? null);
}

function toggle(button, panel) {
  panel.hidden = !panel.hidden;
  button.setAttribute("aria-expanded", String(!panel.hidden));
}

function update(row, model) {
  setText(row.about, about(model));
  drawAnew(row.glance, [model.speculation ?? null], drawGlance);
  drawAnew(row.list, [factsOf(model)], describe);
  row.actions.hidden = pulled(model.id) === undefined;
}

function about(model) {
  const context = joined`${count(model.context_limit)} tokens of context`;
  return [model.is_loaded ? "Loaded" : "Not loaded", context].filter(Boolean).join(" · ");
}

function drawGlance(node, text) {
  node.replaceChildren(element("span", { class: "hidden-text" }, "speculative decoding: "), text ?? "");
  node.hidden = text === null;
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
  ].filter(([, value]) => value !== null && value !== undefined);
}

function sizeOf(model, size) {
  return joined`${bytes(size)}${model.is_loaded ? "" : " when loaded"}`;
}

function draftOf(model) {
  if (!model.draft) return "draft" in model ? "None" : null;
  const size = model.draft_bytes ? sizeOf(model, model.draft_bytes) : null;
  return [model.draft, size].filter(Boolean).join(", ");
}

/** No line at all without a text: there is no draft, or it isn't to be had. */
function speculationOf(model) {
  if (!model.speculation) return [];
  const measured = model.measured ?? {};
  const basis = [counted(measured.requests, "request"), counted(measured.tokens, "token")];
  return [
    ["Speculative decoding", model.speculation],
    ["Why", sentence(measured.why)],
    ["90 % interval", joined`${change(measured.low)} to ${change(measured.high)}`],
    ["Depth", joined`${counted(measured.depth, "drafted token")} a round`],
    ["Acceptance", share(measured.acceptance)],
    ["Tokens per round", ratio(measured.tokens_per_round)],
    ["Measured on", basis.every(Boolean) && measured.requests > 0 ? basis.join(", ") : null],
  ];
}

function cacheOf(cache) {
  return [
    ["Prefix cache hits", joined`${count(cache.hits)} of ${counted(cache.requests, "request")}`],
    ["Prefix cache saved", joined`${counted(cache.saved_tokens, "token")}, holding ${bytes(cache.bytes)}`],
  ];
}
