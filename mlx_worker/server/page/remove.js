// Removing a model: a button for each, and one dialog that says what goes and what stays.

import { ask, explain } from "./api.js";
import { byId, element, setText } from "./dom.js";
import { bytes, ended } from "./format.js";
import { PATH, library, loadLibrary, pulled } from "./library.js";

const TIMEOUT_MS = 120000; // a reply that is being written, or a hub that doesn't answer, comes first
let asked = null; // the id of the model that the dialog is about

export function removeButton(id) {
  const button = element("button", { type: "button", "aria-haspopup": "dialog" }, "Remove…");
  button.addEventListener("click", () => open(id));
  return button;
}

export function startRemove() {
  byId("remove-form").addEventListener("submit", remove);
  byId("remove-close").addEventListener("click", () => byId("remove-dialog").close());
}

function open(id) {
  asked = id;
  setText(byId("remove-title"), `Remove ${id}?`);
  setText(byId("remove-note"), noteOn(pulled(id)));
  setText(byId("remove-error"), "");
  byId("remove-dialog").showModal();
  byId("remove-close").focus();
}

function noteOn(model) {
  if (!model) return "Nothing of it is here; only its failed download is forgotten.";
  const { draft } = model;
  if (!draft) return `${bytes(model.present_bytes)} will be freed.`;
  const size = `${draft.repo} (${bytes(draft.bytes)})`;
  const others = library().models.filter((one) => one.id !== model.id && isSame(one.draft, draft));
  if (others.length === 0) {
    return `${bytes(model.present_bytes)} will be freed. Its draft goes too: ${size}.`;
  }
  const freed = Math.max(0, model.present_bytes - draft.bytes);
  const names = others.map((one) => one.id).join(", ");
  return `${bytes(freed)} will be freed. Its draft stays, for it is shared with ${names}: ${size}.`;
}

function isSame(draft, other) {
  return draft?.repo === other.repo && draft.commit === other.commit;
}

async function remove(event) {
  event.preventDefault();
  const id = asked;
  byId("remove-send").disabled = true;
  setText(byId("remove-error"), "");
  try {
    const path = `${PATH}/${id.split("/").map(encodeURIComponent).join("/")}`;
    const gone = await ask(path, { method: "DELETE", body: {}, timeoutMs: TIMEOUT_MS });
    setText(byId("models-done"), `${id} was removed, ${bytes(gone.freed_bytes)} are free again.`);
    byId("remove-dialog").close();
  } catch (error) {
    setText(byId("remove-error"), ended(explain(error)));
  } finally {
    byId("remove-send").disabled = false;
  }
  await loadLibrary();
}
