// The row of a model, which opens on what is known of it.

import { describe, drawAnew, element, setText } from "./dom.js";
import { bytes, joined } from "./format.js";

let lastNumber = 0;

/** below: nodes under what is known. */
export function makeModelRow(id, ...below) {
  lastNumber += 1;
  const list = element("dl");
  const panel = element("div", { id: `model-${lastNumber}`, hidden: "" }, list, ...below);
  const about = element("span", { class: "about" });
  const glance = element("span", { class: "glance" });
  const attributes = { type: "button", "aria-expanded": "false", "aria-controls": panel.id };
  const button = element("button", attributes, element("span", { class: "name" }, id), about, glance);
  button.addEventListener("click", () => toggle(button, panel));
  const item = element("li", { class: "model" }, element("h3", {}, button), panel);
  return { item, list, about, glance };
}

/** about: words beside the name; line: of its draft, or null; facts: [term, what it is], null left out. */
export function updateModelRow(row, { about, line, facts }) {
  setText(row.about, about.filter(Boolean).join(" · "));
  drawAnew(row.glance, [line ?? null], drawGlance);
  const told = facts.filter(([, value]) => value !== null && value !== undefined);
  drawAnew(row.list, [told], describe);
}

/** Of a model, or of its draft. */
export function sizeOf(model, size) {
  return joined`${bytes(size)}${model.is_loaded ? "" : " when loaded"}`;
}

export function draftOf(model) {
  if (!model.draft) return "draft" in model ? "None" : null;
  const size = model.draft_bytes ? sizeOf(model, model.draft_bytes) : null;
  return [model.draft, size].filter(Boolean).join(", ");
}

function toggle(button, panel) {
  panel.hidden = !panel.hidden;
  button.setAttribute("aria-expanded", String(!panel.hidden));
}

function drawGlance(node, text) {
  node.replaceChildren(element("span", { class: "hidden-text" }, "speculative decoding: "), text ?? "");
  node.hidden = text === null;
}
