// Changes: who changed what, the newest first.

import { ask, explain, serially, withQuery } from "./api.js";
import { byId, element, setText } from "./dom.js";
import { count, ended } from "./format.js";
import { makeRows } from "./rows.js";
import { moment } from "./times.js";

const PATH = "/api/v1/audit";
const N_ROWS = 50; // of a page
const showRows = makeRows(byId("changes"), make, update);
let entries = [];
let cursor = null; // of the next older page; null: there is none

export function startChanges() {
  byId("changes-more").addEventListener("click", loadOlder);
}

export function enterChanges() {
  show([], null);
  loadChanges();
}

export function leaveChanges() {
  show([], null);
}

export const loadChanges = serially(() => load(null, (page) => show(page.data, page.next_cursor)));

async function loadOlder() {
  await load(cursor, (page) => show([...entries, ...page.data], page.next_cursor));
  if (byId("changes-more").hidden) byId("changes-title").focus();
}

async function load(from, use) {
  try {
    use(await ask(withQuery(PATH, { cursor: from, limit: N_ROWS })));
    setText(byId("changes-error"), "");
  } catch (error) {
    setText(byId("changes-error"), `Changes can't be read: ${ended(explain(error))}`);
  }
}

function show(found, next) {
  entries = found;
  cursor = next;
  showRows(entries);
  byId("changes-more").hidden = next === null;
  setText(byId("changes-note"), entries.length ? `${count(entries.length)} shown.` : "None yet.");
}

function make() {
  const cells = Array.from({ length: 5 }, () => element("td"));
  return { item: element("tr", {}, ...cells), cells };
}

function update(row, entry) {
  const texts = [moment(entry.at), entry.actor, entry.action, entry.target, entry.details];
  texts.forEach((text, place) => setText(row.cells[place], text ?? "–"));
}
