// A worker's page: how it is, its models, its settings, and its last requests.

import { ask, explain, serially, withQuery } from "./api.js";
import { makeSure } from "./dialogs.js";
import { byId, describe, drawAnew, setText } from "./dom.js";
import { disableWorker, fleet, loadFleet, onFleet } from "./fleet.js";
import { bytes, count, counted, ended, joined } from "./format.js";
import { showLines } from "./lines.js";
import { forgetModels, showModels } from "./models.js";
import { can } from "./session.js";
import { enterSettings, showSettings } from "./settings.js";
import { connectionOf } from "./workers.js";

const N_RECENT = 60;
const HOT = ["serious", "critical", "throttled"]; // the last one as older workers say it
let current = null; // the id of the worker whose page is open

export function startWorker() {
  onFleet(show);
  byId("disable").addEventListener("click", askToDisable);
}

export function enterWorker(id) {
  current = id;
  forgetModels();
  enterSettings();
  setText(byId("worker-title"), "Worker");
  byId("recent").hidden = !can("view_usage");
  byId("recent-all").href = `#/usage?worker=${encodeURIComponent(id)}`;
  showLines(byId("recent-lines"), []);
  setText(byId("recent-note"), "");
  if (fleet()) show(fleet(), "");
  loadRecent();
}

export function leaveWorker() {
  current = null;
}

function show(workers, trouble) {
  if (current === null || workers === null) return;
  const worker = workers.find((one) => one.id === current);
  byId("worker-cards").hidden = !worker;
  byId("disable-place").hidden = !worker || !can("manage_workers");
  const gone = worker ? "" : "There is no such worker: it was disabled, or the address is wrong.";
  setText(byId("worker-error"), trouble ? `The worker can't be read: ${ended(trouble)}` : gone);
  if (worker) showWorker(worker);
  else describe(byId("worker-facts"), []);
}

function showWorker(worker) {
  setText(byId("worker-title"), worker.name);
  const { state, text } = connectionOf(worker);
  byId("worker-state").dataset.state = state;
  setText(byId("worker-state"), text);
  drawAnew(byId("worker-facts"), [factsOf(worker)], describe);
  showModels(worker);
  showSettings(worker);
}

/** As far as the machine says; null where it says nothing. */
function powerOf({ is_on_battery: isOnBattery, thermal, is_low_power: isLowPower }) {
  const source = isOnBattery === true ? "On battery" : isOnBattery === false ? "Mains" : null;
  const heat = HOT.includes(thermal) ? "slowed down by heat" : null;
  return [source, isLowPower ? "low power mode" : null, heat].filter(Boolean).join(", ") || null;
}

function factsOf(worker) {
  const queue = worker.queue ?? {};
  const waiting = joined`${count(queue.waiting)}${queue.limit ? ` of ${count(queue.limit)} at most` : ""}`;
  return [
    ["Version", worker.version || null],
    ["Running", count(queue.running)],
    ["Waiting", waiting],
    ["Memory in use", bytes(worker.memory?.active_bytes)],
    ["Power", powerOf(worker.power ?? {})],
  ].filter(([, value]) => value !== null);
}

// --- its last requests

export const loadRecent = serially(async () => {
  const id = current;
  if (id === null || !can("view_usage")) return;
  try {
    const { data } = await ask(withQuery("/api/v1/usage", { worker: id, limit: N_RECENT }));
    if (id === current) showRecent(data);
  } catch (error) {
    setText(byId("recent-note"), `Its requests can't be read: ${ended(explain(error))}`);
  }
});

function showRecent(rows) {
  const n_failed = rows.filter((row) => row.error !== null).length;
  const failed = n_failed ? `, ${count(n_failed)} with an error` : "";
  setText(byId("recent-note"), rows.length ? `The last ${counted(rows.length, "request")}${failed}.` : "No requests yet.");
  showLines(byId("recent-lines"), rows);
}

// --- disabling it

function askToDisable() {
  const worker = fleet().find((one) => one.id === current);
  makeSure({
    title: `Disable ${worker.name}?`,
    note: "Its connection is closed and its key stops working, for good: to have it back, add it anew. Its rows in the usage log stay.",
    verb: "Disable",
    work: () => disableWorker(worker.id),
    done: () => {
      location.hash = "#/workers";
      loadFleet();
    },
  });
}
