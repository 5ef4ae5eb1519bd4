// Settings of one worker. The worker's own report is what is shown; a choice that it has yet to
// confirm is marked so. Each setting says when a choice changes nothing now, and why.

import { ask, explain } from "./api.js";
import { byId, element, setText } from "./dom.js";
import { loadFleet, pathOf } from "./fleet.js";
import { sentence } from "./format.js";
import { can, whoAmI } from "./session.js";

const ON_OFF = [["on", "On"], ["off", "Off"]];
const SETTINGS = [
  {
    name: "kv_prefix_cache",
    title: "KV prefix cache",
    choices: ON_OFF,
    note: () => "Keeps what earlier replies computed, so that a prompt which goes on from one starts sooner. On by default.",
  },
  {
    name: "run_requests_together",
    title: "Run requests together",
    choices: ON_OFF,
    note: () => "Pauses drafts. Worker versions so far keep the choice, and still answer one request after another.",
  },
  {
    name: "speculative_decoding",
    title: "Speculative decoding",
    choices: [["auto", "Automatic"], ["off", "Off"]],
    note: noteOnDrafts,
  },
];
const UNKNOWN = "unknown";
const UPDATE = "This worker's version can't take this setting. Update the worker, then it can be changed here.";
const BY_FILE = "This worker can't take this setting from here. policies.json in its folder works: change it there and start the worker again.";

let shown = null; // the worker as last drawn
let rows = []; // of the settings, in their order
const sent = new Map(); // name of a setting → the choice that the worker has yet to confirm

export function startSettings() {
  byId("settings-form").addEventListener("submit", (event) => event.preventDefault());
}

/** Draws the settings anew, for whoever is signed in. */
export function enterSettings() {
  shown = null;
  sent.clear();
  rows = SETTINGS.map(make);
  byId("settings").replaceChildren(...rows.map((row) => row.item));
  tell("", "");
}

export function showSettings(worker) {
  shown = worker;
  confirmSent(worker);
  const problem = worker.settings_problem;
  byId("settings-problem").hidden = !problem;
  const what = isBroken(worker) ? "policies.json on this worker can't be used, so drafts are off" : "The last change was not kept";
  setText(byId("settings-problem"), problem ? `${what}: ${sentence(problem)}` : "");
  setText(byId("settings-reason"), reasonFor(worker));
  for (const row of rows) update(row, worker);
  const isPending = worker.settings_pending || sent.size > 0;
  if (isPending) setText(byId("settings-pending"), pendingText());
  else if (byId("settings-pending").textContent === pendingText()) setText(byId("settings-pending"), "");
}

// --- the nodes

function make(setting) {
  const id = setting.name.replaceAll("_", "-");
  const note = element("p", { id: `${id}-note`, class: "quiet" });
  const control = can("manage_workers") ? makeSelect(setting, id, note) : element("output", { id });
  const label = element("label", { for: id }, setting.title);
  const line = element("div", { class: "setting" }, label, control);
  const item = element("div", {}, line, note);
  return { setting, item, note, control };
}

function makeSelect(setting, id, note) {
  const options = setting.choices.map(([value, text]) => element("option", { value }, text));
  const unknown = element("option", { value: UNKNOWN, hidden: "" }, "Not known");
  const select = element("select", { id, "aria-describedby": `${note.id} settings-reason` }, unknown, ...options);
  select.addEventListener("change", () => save(setting, select));
  return select;
}

function update(row, worker) {
  const { setting, control } = row;
  const isHidden = setting.name === "speculative_decoding" && !whoAmI().organisation.is_speculation_available;
  row.item.hidden = isHidden;
  const value = sent.get(setting.name) ?? chosen(setting, worker);
  setText(row.note, hinder(setting, worker) ?? setting.note(worker, value));
  const text = textOf(setting, worker, value);
  if (control instanceof HTMLSelectElement) updateSelect(row, worker, value);
  else setText(control, text);
}

function updateSelect({ setting, control }, worker, value) {
  for (const option of control.options) {
    if (option.value !== UNKNOWN) setText(option, textOf(setting, worker, option.value));
  }
  if (control.value !== value) control.value = value;
  const isDisabled = isLocked(worker) || hinder(setting, worker) !== null;
  // A control that is switched off would drop the focus to nowhere.
  if (isDisabled && document.activeElement === control) byId("worker-title").focus();
  control.disabled = isDisabled;
}

function textOf(setting, worker, value) {
  const text = setting.choices.find(([choice]) => choice === value)?.[1] ?? "Not known";
  const isIdle = value === "auto" && isTogether(worker);
  return isIdle ? `${text} (not in use)` : text;
}

// --- what holds, and why

function chosen(setting, worker) {
  const value = worker.settings?.[setting.name];
  if (value === undefined || value === null) return UNKNOWN;
  return typeof value === "boolean" ? (value ? "on" : "off") : value;
}

function isTogether(worker) {
  const value = sent.get("run_requests_together");
  return value ? value === "on" : worker.settings?.run_requests_together === true;
}

/** A file that can't be read counts as Off; where only a change wasn't written, another may be. */
function isBroken(worker) {
  return Boolean(worker.settings_problem) && worker.settings?.speculative_decoding === "off";
}

function isLocked(worker) {
  return !worker.connected || isBroken(worker);
}

function reasonFor(worker) {
  if (!can("manage_workers")) return "Your key may see these settings, not change them.";
  if (!worker.connected) return "The worker is not connected. These are its last known settings; they can be changed once it is back.";
  if (isBroken(worker)) return "They can be changed once the file is mended and the worker has started again.";
  return "";
}

/** Why the setting can't be changed from here, whatever the moment; null: it can. */
function hinder(setting, worker) {
  if (worker.takes[setting.name] || !isHeard(worker)) return null;
  return setting.name === "speculative_decoding" && decides(worker) ? BY_FILE : UPDATE;
}

/** Whether it has ever said what it can. */
function isHeard(worker) {
  return worker.connected || worker.version !== null && worker.version !== "";
}

/** Whether it measures its drafts, as all but old versions do. */
function decides(worker) {
  return worker.models.some((model) => model.speculation && model.speculation !== "Needs a worker update");
}

function noteOnDrafts(worker, value) {
  const notes = [];
  const { display_name: name, speculative_decoding: platform } = worker.platform;
  if (platform === "off") notes.push(`${name} has switched speculative decoding off. Your choice is kept and applies once it is back.`);
  if (isTogether(worker)) notes.push(value === "auto" ? "Automatic is not in use while Run requests together is on." : "This changes nothing while Run requests together is on: drafts are paused.");
  const hasDraft = worker.models.some((model) => model.draft);
  if (worker.models.length > 0 && !hasDraft) notes.push("No model of this worker has a draft, so this changes nothing now.");
  return notes.join(" ") || "Automatic: drafts are used where they are measured to be faster.";
}

// --- changing one

async function save(setting, control) {
  const worker = shown;
  const value = control.value;
  const name = `${setting.title}: ${control.selectedOptions[0].text}`;
  sent.set(setting.name, value);
  tell(pendingText(), "");
  try {
    await send(worker.id, setting.name, value);
  } catch (error) {
    sent.delete(setting.name);
    tell("", `${name} was not sent: ${explain(error)}`);
  }
  await loadFleet();
  // By now the worker's answer is known, or on its way: what holds is what it reports.
  if (shown?.id === worker.id) dropStale(setting.name);
}

function send(id, name, value) {
  const isDrafts = name === "speculative_decoding";
  const path = `${pathOf(id)}/${isDrafts ? "speculative-decoding" : "settings"}`;
  return ask(path, { method: "PATCH", body: isDrafts ? { mode: value } : { [name]: value === "on" } });
}

function confirmSent(worker) {
  for (const setting of SETTINGS) {
    const value = sent.get(setting.name);
    if (value === undefined || worker.settings_pending || chosen(setting, worker) !== value) continue;
    sent.delete(setting.name);
    const text = setting.choices.find(([choice]) => choice === value)[1];
    setText(byId("settings-pending"), `${setting.title}: ${text}, from the next request on.`);
  }
}

function dropStale(name) {
  if (shown.settings_pending || !sent.delete(name)) return;
  tell("", "");
  showSettings(shown);
}

function pendingText() {
  return "Sent, not yet confirmed by the worker.";
}

function tell(done, error) {
  setText(byId("settings-pending"), done);
  setText(byId("settings-error"), sentence(error) ?? "");
}
