// Dialogs: whether someone is sure, and a text that is shown once. Closing one gives the focus back
// to where it was.

import { explain } from "./api.js";
import { byId, setText } from "./dom.js";
import { sentence } from "./format.js";

let asked = null; // what happens once someone is sure

export function startDialogs() {
  for (const button of document.querySelectorAll("[data-close]")) {
    button.addEventListener("click", () => button.closest("dialog").close());
  }
  byId("sure-form").addEventListener("submit", goOn);
  byId("once-copy").addEventListener("click", copy);
  byId("once-dialog").addEventListener("close", () => byId("once-text").replaceChildren());
}

export function closeDialogs() {
  for (const dialog of document.querySelectorAll("dialog[open]")) dialog.close();
}

/** verb: what the button says; work(): what it does, and where that throws, the dialog stays; done(): then. */
export function makeSure({ title, note, verb, work, done }) {
  asked = { work, done };
  setText(byId("sure-title"), title);
  setText(byId("sure-note"), note);
  setText(byId("sure-send"), verb);
  setText(byId("sure-error"), "");
  byId("sure-dialog").showModal();
  byId("sure-close").focus();
}

async function goOn(event) {
  event.preventDefault();
  byId("sure-send").disabled = true;
  await attempt("sure-error", async () => {
    const { work, done } = asked;
    await work();
    byId("sure-dialog").close();
    done();
  });
  byId("sure-send").disabled = false;
}

/** What no later visit can show again. */
export function showOnce({ title, note, text }) {
  setText(byId("once-title"), title);
  setText(byId("once-note"), note);
  setText(byId("once-text"), text);
  setText(byId("once-copied"), "");
  byId("once-dialog").showModal();
  byId("once-copy").focus();
}

async function copy() {
  try {
    await navigator.clipboard.writeText(byId("once-text").textContent);
    setText(byId("once-copied"), "Copied.");
  } catch {
    getSelection().selectAllChildren(byId("once-text"));
    setText(byId("once-copied"), "Selected: copy it with Ctrl or ⌘ and C.");
  }
}

/** Does work(), and says in `place` what went wrong. */
export async function attempt(place, work) {
  setText(byId(place), "");
  try {
    await work();
  } catch (error) {
    setText(byId(place), sentence(explain(error)));
  }
}
