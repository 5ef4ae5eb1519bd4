// The usage log: one row for each request, the newest first, with filters that the download keeps.

import { ask, explain, serially, withQuery } from "./api.js";
import { byId, element, setText } from "./dom.js";
import { fleet, onFleet } from "./fleet.js";
import { count, ended, milliseconds, share, speed } from "./format.js";
import { showLines } from "./lines.js";
import { makeRows } from "./rows.js";
import { moment } from "./times.js";

const PATH = "/api/v1/usage";
const N_ROWS = 50; // of a page
const NONE = "–";
const showRows = makeRows(byId("usage-rows"), make, update);

let isOpen = false;
let rows = []; // as shown, the newest first
let cursor = null; // of the next older page; null: there is none
let turn = 0; // grows with every change of filters: an answer to older ones is dropped
const names = { worker: new Map(), model: new Map(), key: new Map() }; // id → name, of filters

export function startUsage() {
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  byId("filters").addEventListener("change", begin);
  byId("usage-more").addEventListener("click", loadOlder);
  onFleet((workers) => workers && learnWorkers(workers));
}

/** query: URLSearchParams with the filters to begin with. */
export function enterUsage(query) {
  isOpen = true;
  if (fleet()) learnWorkers(fleet());
  for (const name of Object.keys(names)) {
    const value = query.get(name);
    if (value && !names[name].has(value)) learn(name, value, value);
    offer(name);
    byId(`filter-${name}`).value = value ?? "";
  }
  begin();
}

export function leaveUsage() {
  isOpen = false;
  show([], null);
}

/** So that whoever signs in next sees nothing of this. */
export function forgetUsage() {
  for (const known of Object.values(names)) known.clear();
  leaveUsage();
}

// --- which rows

function filters() {
  const span = Number(byId("filter-span").value);
  return {
    worker: byId("filter-worker").value,
    model: byId("filter-model").value,
    key: byId("filter-key").value,
    since: span ? new Date(Date.now() - 1000 * span).toISOString() : null,
    error: byId("filter-error").checked ? "any" : null,
  };
}

function begin() {
  turn += 1;
  show([], null);
  setText(byId("usage-note"), "Asking…");
  byId("csv").href = withQuery(PATH, { ...filters(), format: "csv" });
  loadUsage();
}

/** The newest page, into what is shown. */
export const loadUsage = serially(async () => {
  if (!isOpen) return;
  byId("csv").href = withQuery(PATH, { ...filters(), format: "csv" });
  await load(null, (page) => {
    const oldest = page.data.at(-1)?.id;
    const older = rows.filter((row) => row.id < oldest);
    // Without a row in common there may be a gap between the two; the older ones then go.
    const isJoined = older.length > 0 && rows.some((row) => row.id >= oldest);
    if (isJoined) show([...page.data, ...older], cursor);
    else show(page.data, page.next_cursor);
  });
});

async function loadOlder() {
  byId("usage-more").disabled = true;
  await load(cursor, (page) => {
    const known = new Set(rows.map((row) => row.id));
    show([...rows, ...page.data.filter((row) => !known.has(row.id))], page.next_cursor);
  });
  byId("usage-more").disabled = false;
  if (byId("usage-more").hidden) byId("usage-title").focus();
}

async function load(from, use) {
  const mine = turn;
  try {
    const page = await ask(withQuery(PATH, { ...filters(), cursor: from, limit: N_ROWS }));
    if (mine !== turn || !isOpen) return;
    setText(byId("usage-error"), "");
    use(page);
  } catch (error) {
    if (mine === turn) setText(byId("usage-error"), `Requests can't be read: ${ended(explain(error))}`);
  }
}

function show(found, next) {
  rows = found;
  cursor = next;
  for (const row of rows) learnRow(row);
  for (const name of Object.keys(names)) offer(name);
  showRows(rows);
  showLines(byId("usage-lines"), rows);
  byId("usage-more").hidden = next === null;
  setText(byId("usage-note"), rows.length ? `${count(rows.length)} shown${next === null ? ", all there are" : ""}.` : "No request fits.");
}

// --- a row

function make() {
  const cells = Array.from({ length: 10 }, (_, place) => {
    return element("td", place >= 4 && place <= 8 ? { class: "number" } : {});
  });
  return { item: element("tr", {}, ...cells), cells };
}

function update(row, request) {
  textsOf(request).forEach((text, place) => setText(row.cells[place], text ?? NONE));
  row.cells[9].className = request.error ? "error" : "";
}

function textsOf(row) {
  return [
    moment(row.at),
    row.key_name,
    row.worker_name,
    row.model,
    count(row.prompt_tokens),
    count(row.completion_tokens),
    milliseconds(row.ttft_ms),
    speed(row.tokens_per_second),
    share(row.draft_acceptance_rate),
    row.error ?? row.finish_reason ?? "under way",
  ];
}

// --- what the filters offer

function learnWorkers(workers) {
  for (const worker of workers) {
    learn("worker", worker.id, worker.name);
    for (const model of worker.models) learn("model", model.id, model.id);
  }
  if (isOpen) for (const name of Object.keys(names)) offer(name);
}

function learnRow(row) {
  learn("key", row.key_id, row.key_name);
  learn("model", row.model, row.model);
  if (row.worker_id) learn("worker", row.worker_id, row.worker_name ?? row.worker_id);
}

function learn(name, id, text) {
  names[name].set(id, text);
}

/** The options, anew only where others are known: the choice stays, and so does an open list. */
function offer(name) {
  const select = byId(`filter-${name}`);
  const wanted = [["", "All"], ...names[name]];
  const offered = [...select.options].map((option) => [option.value, option.text]);
  if (JSON.stringify(wanted) === JSON.stringify(offered)) return;
  const choice = select.value;
  select.replaceChildren(...wanted.map(([value, text]) => element("option", { value }, text)));
  select.value = choice;
}
