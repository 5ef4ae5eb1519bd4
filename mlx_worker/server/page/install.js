// The dialog in which a model is chosen and downloaded. The list of downloads is in it meanwhile.

import { askForFirst, explain } from "./api.js";
import { byId, drawAnew, element, setText } from "./dom.js";
import { awaitEnd } from "./downloads.js";
import { bytes, ended } from "./format.js";
import { PATH, library, loadLibrary } from "./library.js";

let searched = ""; // what the list is narrowed to: what was typed, not what was chosen from it

export function startInstall() {
  byId("install").addEventListener("click", open);
  byId("install-close").addEventListener("click", () => byId("install-dialog").close());
  byId("install-dialog").addEventListener("close", () => byId("downloads-place").append(byId("downloads")));
  byId("install-form").addEventListener("submit", install);
  byId("install-draft").addEventListener("change", () => showCatalogue(library()));
  byId("catalogue").addEventListener("change", (event) => choose(event.target.value));
  byId("install-name").addEventListener("input", (event) => search(event.target.value));
}

export function showCatalogue({ catalogue, disk }) {
  const isIn = (one) => `${one.id} ${one.title} ${one.variant} ${one.repo}`.toLowerCase().includes(searched);
  const found = catalogue.filter(isIn);
  drawAnew(byId("catalogue"), [found, byId("install-draft").checked], draw);
  byId("no-match").hidden = found.length > 0;
  mark();
  setText(byId("install-note"), disk.folder ? `${bytes(disk.free_bytes)} are free in ${disk.folder}.` : "");
}

function open() {
  setText(byId("install-error"), "");
  byId("install-downloads").append(byId("downloads"));
  byId("install-dialog").showModal();
  byId("install-name").focus();
  search(byId("install-name").value);
  loadLibrary();
}

function search(text) {
  searched = text.trim().toLowerCase();
  showCatalogue(library());
}

function choose(id) {
  byId("install-name").value = id;
  mark();
}

/** The choice that the name stands for, if it is in the list. */
function mark() {
  const name = byId("install-name").value.trim();
  for (const input of byId("catalogue").querySelectorAll("input")) input.checked = input.value === name;
}

function draw(list, found, hasDraft) {
  const focused = list.contains(document.activeElement) ? document.activeElement.value : null;
  list.replaceChildren(...found.map((one) => choice(one, hasDraft)));
  const inputs = [...list.querySelectorAll("input")];
  if (focused !== null) (inputs.find((input) => input.value === focused) ?? byId("install-name")).focus();
}

function choice(one, hasDraft) {
  const input = element("input", { type: "radio", name: "install-choice", value: one.id });
  const name = element("span", {}, `${one.title}, ${one.variant}`);
  const about = element("span", { class: "about" }, aboutOf(one, hasDraft));
  return element("li", {}, element("label", {}, input, name, about));
}

function aboutOf(one, hasDraft) {
  return [
    `${bytes(one.bytes + (hasDraft ? one.draft_bytes : 0))} to download`,
    `${bytes(one.need_bytes)} of memory needed`,
    one.fits ? "fits" : "too large for this machine",
    one.is_pulled ? "already here" : null,
    hasDraft && !one.draft ? "has no draft" : null,
  ]
    .filter(Boolean)
    .join(" · ");
}

async function install(event) {
  event.preventDefault();
  const model = byId("install-name").value.trim();
  if (model === "") return;
  begin();
  const draft = byId("install-draft").checked ? "auto" : "none";
  const asked = askForFirst(`${PATH}/pull`, { model, draft });
  const failed = await asked.then(awaitEnd, (error) => error);
  end();
  setText(byId("install-error"), failed ? ended(explain(failed)) : "");
  if (!failed) choose("");
  search(byId("install-name").value);
  await loadLibrary();
}

function begin() {
  byId("install-send").disabled = true;
  setText(byId("install-error"), "");
  setText(byId("models-done"), "");
  setText(byId("install-asking"), "Asking the hub…");
}

/** The focus of a button that was disabled is lost: it goes back. */
function end() {
  byId("install-send").disabled = false;
  setText(byId("install-asking"), "");
  const isLost = document.activeElement === document.body || document.activeElement === byId("install-dialog");
  if (byId("install-dialog").open && isLost) byId("install-send").focus();
}
