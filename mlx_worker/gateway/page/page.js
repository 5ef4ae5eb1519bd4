// The console: who is signed in, which part is seen, and what happens as the gateway tells it. What is
// in each part is in a file of its own.

import { Refusal, explain, onSessionOver } from "./api.js";
import { enterChanges, leaveChanges, loadChanges, startChanges } from "./changes.js";
import { closeDialogs, startDialogs } from "./dialogs.js";
import { byId, setText } from "./dom.js";
import { forgetFleet, loadFleet } from "./fleet.js";
import { sentence } from "./format.js";
import { enterKeys, leaveKeys, loadKeys, startKeys } from "./keys.js";
import { listen, stopListening } from "./live.js";
import { askForKey, can, hideForm, recognise, startSession, whoAmI } from "./session.js";
import { startSettings } from "./settings.js";
import { enterUsage, forgetUsage, leaveUsage, loadUsage, startUsage } from "./usage.js";
import { enterWorker, leaveWorker, loadRecent, startWorker } from "./worker.js";
import { enterWorkers, startWorkers } from "./workers.js";

const RETRY_MS = 2000;
const NOTHING = () => {};
const PARTS = {
  workers: { title: "workers-title", enter: enterWorkers, leave: NOTHING },
  worker: { title: "worker-title", enter: enterWorker, leave: leaveWorker },
  usage: { title: "usage-title", enter: enterUsage, leave: leaveUsage, needs: "view_usage" },
  keys: { title: "keys-title", enter: enterKeys, leave: leaveKeys, needs: "manage_keys" },
  changes: { title: "changes-title", enter: enterChanges, leave: leaveChanges, needs: "manage_keys" },
};
let part = null; // the name of the part that is seen; null: nobody is signed in
let timer = 0;

// --- being connected

/** Who is signed in, if the gateway answers; then everything is loaded and followed. */
async function connect() {
  clearTimeout(timer);
  try {
    await recognise();
  } catch (error) {
    if (error instanceof Refusal && error.status === 401) return leave(part ? "over" : "");
    return lose(error);
  }
  hideForm();
  showWho();
  if (part === null) route();
  if (!document.hidden) listen(onOpen, refresh, onBroken);
}

function onOpen() {
  setState("ready", "Connected");
  setTrouble("");
  refresh({ workers: true, usage: true });
  if (part === "keys") loadKeys();
  if (part === "changes") loadChanges();
}

/** A stream that had been open is asked for again at once: it ends with the session as well. */
function onBroken(wasOpen) {
  if (wasOpen) connect();
  else lose(new Error("no stream"));
}

function lose(error) {
  clearTimeout(timer);
  timer = setTimeout(connect, RETRY_MS);
  setState("lost", "Not connected, trying again");
  const old = part ? " What is shown may be old." : "";
  setTrouble(`${sentence(explain(error))}${old} Trying again every ${RETRY_MS / 1000} seconds.`);
}

function refresh({ workers, usage }) {
  if (workers) recognise().catch(NOTHING).then(loadFleet); // what is offered may have changed as well
  if (usage && part === "worker") loadRecent();
  if (usage && part === "usage") loadUsage();
}

// --- being signed in

/** Back to the form. why: "over" where the gateway says so, "out" where it was asked for. */
function leave(why) {
  clearTimeout(timer);
  stopListening();
  closeDialogs();
  leavePart();
  forgetFleet();
  forgetUsage();
  for (const id of ["main", "nav", "signed-in"]) byId(id).hidden = true;
  setTrouble("");
  setState("locked", "Signed out");
  document.title = "Sign in · mlx-worker gateway";
  const reasons = { over: "Your session is over. Sign in again to go on.", out: "You are signed out." };
  askForKey(reasons[why] ?? "");
}

function onSignedOut(error) {
  if (error) return setTrouble(`You are still signed in: ${sentence(explain(error))}`);
  leave("out");
}

function showWho() {
  const { organisation, key } = whoAmI();
  setText(byId("who"), `${organisation.name} · ${key.name}, ${key.role}`);
  byId("nav-usage").hidden = !can("view_usage");
  for (const id of ["nav-keys", "nav-changes"]) byId(id).hidden = !can("manage_keys");
  for (const id of ["main", "nav", "signed-in"]) byId(id).hidden = false;
}

// --- where one is

function route() {
  if (!whoAmI()) return;
  const [path, query] = location.hash.slice(1).split("?");
  const [, first, id] = path.split("/");
  const name = first === "workers" && id ? "worker" : first;
  const isOffered = name in PARTS && (!PARTS[name].needs || can(PARTS[name].needs));
  enterPart(isOffered ? name : "workers", id ? decoded(id) : new URLSearchParams(query));
}

function enterPart(name, value) {
  const isFirst = part === null;
  leavePart();
  part = name;
  for (const other of Object.keys(PARTS)) byId(`${other}-view`).hidden = other !== name;
  for (const link of byId("nav").querySelectorAll("a")) mark(link, name);
  PARTS[name].enter(value);
  const title = byId(PARTS[name].title);
  document.title = `${title.textContent} · mlx-worker gateway`;
  if (!isFirst || document.activeElement === document.body) title.focus();
}

function leavePart() {
  if (part) PARTS[part].leave();
  part = null;
}

function mark(link, name) {
  const isHere = link.hash === `#/${name}` || (name === "worker" && link.hash === "#/workers");
  if (isHere) link.setAttribute("aria-current", "page");
  else link.removeAttribute("aria-current");
}

/** A text that is no part of an address stays as it is. */
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

// --- what is said of it

function setState(state, text) {
  byId("state").dataset.state = state;
  setText(byId("state"), text);
}

function setTrouble(text) {
  setText(byId("trouble"), text);
  byId("trouble").hidden = text === "";
  document.body.classList.toggle("is-stale", text !== "");
}

// --- start

onSessionOver(() => {
  if (part) leave("over");
});
window.addEventListener("hashchange", route);
document.addEventListener("visibilitychange", () => {
  if (part === null) return;
  if (document.hidden) stopListening();
  else connect();
});
byId("skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address says where one is, and stays
  byId("main").focus();
});
startDialogs();
startSession(connect, onSignedOut);
startWorkers();
startWorker();
startSettings();
startUsage();
startKeys();
startChanges();
connect();
