// Workers: which there are, how they are, and adding one.

import { attempt, showOnce } from "./dialogs.js";
import { byId, drawAnew, element, setText } from "./dom.js";
import { addWorker, fleet, loadFleet, onFleet } from "./fleet.js";
import { ended, joined } from "./format.js";
import { makeRows } from "./rows.js";
import { can } from "./session.js";
import { moment } from "./times.js";

const showRows = makeRows(byId("workers"), make, update);

export function startWorkers() {
  onFleet(show);
  byId("add").addEventListener("click", open);
  byId("add-form").addEventListener("submit", add);
}

export function enterWorkers() {
  byId("add-place").hidden = !can("manage_workers");
  setText(byId("workers-done"), "");
  if (fleet()) show(fleet(), "");
}

/** "Connected since …", as a state and in words. */
export function connectionOf(worker) {
  if (worker.connected) {
    const since = joined`Connected since ${moment(worker.since)}`;
    const is = worker.draining ? "Draining: finishes what it has begun, takes nothing new" : since;
    return { state: worker.draining ? "draining" : "ready", text: is ?? "Connected" };
  }
  const seen = joined`Not connected since ${moment(worker.seen)}`;
  return { state: "lost", text: seen ?? "Not connected yet" };
}

function show(workers, trouble) {
  if (workers) showRows(workers);
  byId("workers-note").hidden = workers === null || workers.length > 0;
  setText(byId("workers-note"), can("manage_workers") ? "None yet. Add one, then start it." : "None yet.");
  setText(byId("workers-error"), trouble ? `Workers can't be read: ${ended(trouble)}` : "");
}

function make(id) {
  const link = element("a", { href: `#/workers/${encodeURIComponent(id)}` });
  const state = element("span", { class: "connection" });
  const version = element("span", { class: "quiet" });
  const models = element("ul", { class: "lines-of-models" });
  const told = element("p", { class: "state" }, state, version);
  const item = element("li", { class: "worker" }, element("h3", {}, link), told, models);
  return { item, link, state, version, models };
}

function update(row, worker) {
  const { state, text } = connectionOf(worker);
  setText(row.link, worker.name);
  row.state.dataset.state = state;
  setText(row.state, text);
  setText(row.version, worker.version ? `Version ${worker.version}` : "");
  drawAnew(row.models, [worker.models.map((model) => [model.id, model.speculation])], drawModels);
}

/** Each with the line of its draft; without one, its name alone. */
function drawModels(list, models) {
  const items = models.map(([id, line]) => {
    const told = line ? [element("span", { class: "hidden-text" }, "speculative decoding: "), line] : [];
    return element("li", {}, element("span", { class: "name" }, id), element("span", {}, ...told));
  });
  list.replaceChildren(...items);
}

// --- adding one

function open() {
  byId("add-name").value = "";
  setText(byId("add-error"), "");
  setText(byId("workers-done"), "");
  byId("add-dialog").showModal();
  byId("add-name").focus();
}

async function add(event) {
  event.preventDefault();
  const name = byId("add-name").value.trim();
  byId("add-send").disabled = true;
  await attempt("add-error", async () => {
    const made = await addWorker(name);
    byId("add-dialog").close();
    showOnce({
      title: `${name} is added`,
      note: "Put these lines into config.yaml on the worker and start it again. They hold its key and are shown only now.",
      text: linesFor(made.key),
    });
    setText(byId("workers-done"), ended(`${name} was added`));
  });
  byId("add-send").disabled = false;
  await loadFleet();
}

/** Of the worker's config.yaml. */
function linesFor(key) {
  const scheme = location.protocol === "https:" ? "wss" : "ws";
  return `gateway:\n  url: ${scheme}://${location.host}\n  key: ${key}\n`;
}
