// API keys of the organisation: which there are, creating and revoking them.

import { ask, explain, serially } from "./api.js";
import { attempt, makeSure, showOnce } from "./dialogs.js";
import { byId, element, setText } from "./dom.js";
import { ended } from "./format.js";
import { beyond, inWords, nameOf, ROLES } from "./permissions.js";
import { makeRows } from "./rows.js";
import { whoAmI } from "./session.js";
import { day } from "./times.js";

const PATH = "/api/v1/keys";
const showRows = makeRows(byId("keys"), make, update);
let keys = [];

export function startKeys() {
  byId("create").addEventListener("click", open);
  byId("create-form").addEventListener("submit", create);
  byId("create-role").addEventListener("change", offerExtra);
}

export function enterKeys() {
  setText(byId("keys-done"), "");
  loadKeys();
}

export function leaveKeys() {
  keys = [];
  showRows(keys);
}

export const loadKeys = serially(async () => {
  try {
    keys = (await ask(PATH)).data;
    showRows(keys);
    setText(byId("keys-error"), "");
  } catch (error) {
    setText(byId("keys-error"), `Keys can't be read: ${ended(explain(error))}`);
  }
});

function make(id) {
  const cells = Array.from({ length: 6 }, () => element("td"));
  const revoke = element("button", { type: "button", "aria-haspopup": "dialog" });
  const state = element("span");
  cells[1].className = "code";
  cells[5].append(state, revoke);
  revoke.addEventListener("click", () => askToRevoke(id));
  return { item: element("tr", {}, ...cells), cells, revoke, state };
}

function update(row, key) {
  const isOwn = key.id === whoAmI()?.key.id;
  const texts = [isOwn ? `${key.name} (yours)` : key.name, key.hint, key.role, inWords(ROLES[key.role].concat(key.permissions)), day(key.created)];
  texts.forEach((text, place) => setText(row.cells[place], text ?? "–"));
  const isRevoked = Boolean(key.revoked);
  setText(row.state, isRevoked ? `Revoked ${day(key.revoked)}` : "");
  setText(row.revoke, `Revoke ${key.name}…`);
  row.revoke.hidden = isRevoked;
}

// --- creating one

function open() {
  byId("create-form").reset();
  offerExtra();
  setText(byId("create-error"), "");
  byId("create-dialog").showModal();
  byId("create-name").focus();
}

function offerExtra() {
  const role = byId("create-role").value;
  setText(byId("create-note"), `May ${inWords(ROLES[role])}.`);
  const boxes = beyond(role).map(([permission]) => {
    const box = element("input", { type: "checkbox", value: permission });
    return element("label", { class: "check" }, box, nameOf(permission));
  });
  byId("create-permissions").replaceChildren(...boxes);
  byId("create-extra").hidden = boxes.length === 0;
}

async function create(event) {
  event.preventDefault();
  byId("create-send").disabled = true;
  await attempt("create-error", async () => {
    const made = await ask(PATH, { method: "POST", body: formValues() });
    byId("create-dialog").close();
    showOnce({
      title: `The key ${made.name}`,
      note: "Keep it somewhere safe: it is shown only now.",
      text: made.secret,
    });
    setText(byId("keys-done"), ended(`${made.name} was created`));
  });
  byId("create-send").disabled = false;
  await loadKeys();
}

function formValues() {
  const boxes = byId("create-permissions").querySelectorAll("input:checked");
  const permissions = [...boxes].map((box) => box.value);
  return { name: byId("create-name").value.trim(), role: byId("create-role").value, permissions };
}

// --- revoking one

function askToRevoke(id) {
  const key = keys.find((one) => one.id === id);
  const isOwn = id === whoAmI().key.id;
  const own = " You are signed in with it, so this signs you out.";
  makeSure({
    title: `Revoke ${key.name}?`,
    note: `Whoever uses the key that begins with ${key.hint} is refused from then on. This can't be undone.${isOwn ? own : ""}`,
    verb: "Revoke",
    work: () => ask(`${PATH}/${encodeURIComponent(id)}`, { method: "DELETE" }),
    done: () => {
      setText(byId("keys-done"), ended(`${key.name} was revoked`));
      byId("keys-title").focus();
      loadKeys();
    },
  });
}
