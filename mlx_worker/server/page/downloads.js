// A row for each model that is coming, or of which something is missing.

import { ask, askForFirst, explain } from "./api.js";
import { byId, element, setText } from "./dom.js";
import { bytes, bytesOf, ended, joined, span } from "./format.js";
import { PATH, loadLibrary } from "./library.js";
import { removeButton } from "./remove.js";

const WINDOW_MS = 15000; // over which a speed is measured
const rows = new Map(); // id of a model → the nodes of its row
const NOT_WANTED = "none was wanted"; // how a record says that no draft was asked for
const coming = new Set(); // those that were coming when they were last seen

export function showDownloads(library) {
  const wanted = library.pulls.filter((pull) => pull.state !== "done").map(asPull);
  const ids = new Set(library.pulls.map((pull) => pull.model));
  const others = library.models.filter((model) => model.state !== "ready" && !ids.has(model.id));
  wanted.push(...others.map(asRest));
  for (const id of rows.keys()) if (!wanted.some((one) => one.id === id)) removeRow(id);
  for (const one of wanted) update(rows.get(one.id) ?? addRow(one.id), one);
  byId("download-list").hidden = wanted.length === 0;
  tellEnds(library);
}

/** One that this worker downloads, or did. */
function asPull(pull) {
  const asked = { draft: pull.draft, revision: pull.revision };
  return { ...pull, id: pull.model, asked, error: pull.error?.message ?? null, isOurs: true };
}

/** One that it doesn't: somebody else may. */
function asRest(model) {
  const state = model.state === "incomplete" ? "stopped" : "running";
  const draft = model.draft?.repo ?? (model.draft_note === NOT_WANTED ? "none" : "auto");
  const asked = { draft, revision: model.revision };
  return { ...model, state, asked, file: null, error: null, isOurs: false };
}

/** One that was just begun here: its end is said, however soon it comes. */
export function awaitEnd(first) {
  coming.add(first.id);
}

/** What came to its end while this page looked on is said once. */
function tellEnds(library) {
  for (const pull of library.pulls) {
    if (pull.state === "running") coming.add(pull.model);
    else if (coming.delete(pull.model) && pull.state === "done") {
      const model = library.models.find((one) => one.id === pull.model);
      setText(byId("models-done"), ended(`${pull.model} is here${withDraft(model)}`));
    }
  }
}

function withDraft(model) {
  if (!model) return "";
  if (model.draft) return `, with its draft ${model.draft.repo}`;
  return `, without a draft${model.draft_note ? `: ${model.draft_note}` : ""}`;
}

function addRow(id) {
  const bar = element("progress", { "aria-label": `Download of ${id}`, value: "0", max: "1" });
  const how = element("p", { class: "quiet how" });
  const file = element("p", { class: "quiet" });
  const error = element("p", { class: "error", role: "alert" });
  const stop = button("Stop", () => ask(`${PATH}/stop`, { method: "POST", body: { model: id } }));
  const goOn = button("Go on", async () => {
    awaitEnd(await askForFirst(`${PATH}/pull`, { model: id, ...rows.get(id).asked }));
  });
  const line = element("div", { class: "line" }, stop, goOn, removeButton(id));
  const name = element("p", { class: "name" }, id);
  const item = element("li", { class: "download" }, name, bar, how, file, error, line);
  byId("download-list").append(item);
  rows.set(id, { item, bar, how, file, error, stop, goOn, asked: {}, seen: [] });
  return rows.get(id);

  function button(text, act) {
    const made = element("button", { type: "button" }, text);
    made.addEventListener("click", () => done(made, act));
    return made;
  }

  async function done(pressed, act) {
    pressed.disabled = true;
    const failed = await act().then(() => null, (error) => error);
    pressed.disabled = false;
    await loadLibrary();
    if (failed) setText(error, ended(explain(failed)));
    const other = [stop, goOn].find((one) => !one.hidden);
    if (document.activeElement === document.body) other?.focus();
  }
}

function removeRow(id) {
  const { item } = rows.get(id);
  const hadFocus = item.contains(document.activeElement);
  item.remove();
  rows.delete(id);
  if (hadFocus) byId(byId("install-dialog").open ? "install-name" : "install").focus();
}

function update(row, one) {
  const isRunning = one.state === "running";
  row.asked = one.asked;
  row.bar.max = one.bytes || 1;
  row.bar.value = one.present_bytes;
  setText(row.how, [howFar(one), isRunning ? howFast(row, one) : null].filter(Boolean).join(" · "));
  setText(row.file, isRunning ? (one.file ?? "") : "");
  setText(row.error, ended(one.error) ?? "");
  row.stop.hidden = !isRunning || !one.isOurs;
  row.goOn.hidden = isRunning;
}

function howFar(one) {
  if (!one.bytes) return one.state === "running" ? "Asking the hub…" : "Nothing came yet";
  const far = bytesOf(one.present_bytes, one.bytes);
  if (one.state !== "running") return `Stopped at ${far}`;
  return one.isOurs ? far : `${far}, by another program`;
}

/** "12.0 MB/s · 5 min left", as measured while this page looks on. */
function howFast(row, one) {
  const now = { ms: performance.now(), bytes: one.present_bytes };
  row.seen = [...row.seen.filter((then) => now.ms - then.ms < WINDOW_MS && then.bytes <= now.bytes), now];
  const [first] = row.seen;
  const perSecond = (1000 * (now.bytes - first.bytes)) / (now.ms - first.ms);
  if (!(perSecond > 0)) return null;
  const left = joined`${span((one.bytes - one.present_bytes) / perSecond)} left`;
  return [`${bytes(perSecond)}/s`, left].filter(Boolean).join(" · ");
}
