// The console page: asks the worker how it is every two seconds while it is seen, and says so when
// nobody answers. What is in each card is in a file of its own.

import { Refusal, ask, explain, forgetKey, hasKey, keepKey } from "./api.js";
import { byId, setText } from "./dom.js";
import { showDownloads } from "./downloads.js";
import { showFigures } from "./figures.js";
import { sentence, span } from "./format.js";
import { showCatalogue, startInstall } from "./install.js";
import { loadLibrary, onLibrary } from "./library.js";
import { showModels } from "./models.js";
import { offerModels, startPrompt } from "./prompt.js";
import { startRemove } from "./remove.js";
import { loadSettings, noteSpeculation, startSettings } from "./settings.js";

const POLL_MS = 2000;
const STATES = {
  ready: "Ready",
  draining: "Draining: finishes what it has begun, takes nothing new",
  failing: "Failing",
};
let timer = 0;
let isAsking = false;
let isLocked = false; // until a key is given
let hasAnswered = false; // the last time it was asked
let lastSeen = null; // when it last answered

async function poll() {
  clearTimeout(timer);
  if (isAsking || isLocked || document.hidden) return;
  isAsking = true;
  const found = await ask("/status").catch((error) => error);
  isAsking = false;
  timer = setTimeout(poll, POLL_MS);
  if (found instanceof Error) showTrouble(found);
  else showStatus(found);
}

function showStatus(status) {
  const models = status.models ?? [];
  lastSeen = new Date();
  setState(status.state ?? "ready", status.why);
  setText(byId("facts"), `Version ${status.version} · up ${span(status.uptime_s)}${slowness(status.power)}`);
  showModels(models);
  showFigures(status);
  offerModels(models);
  noteSpeculation(status);
  setText(byId("link"), linkText(status.link));
  setTrouble("");
  if (!hasAnswered) {
    loadSettings();
    loadLibrary();
  }
  hasAnswered = true;
}

/** What slows this machine down, as far as it says. */
function slowness(power) {
  const isHot = ["serious", "critical"].includes(power?.thermal);
  return `${power?.is_low_power ? " · low power mode" : ""}${isHot ? " · slowed down by heat" : ""}`;
}

/** How the link to the gateway is, in a few words; nothing where there is no gateway. */
function linkText(link) {
  if (!link) return "";
  if (link.state === "connected") return `Gateway ${link.url}: connected as ${link.name}`;
  return `Gateway ${link.url}: ${link.why ? `${link.state}, ${link.why}` : link.state}`;
}

function showTrouble(error) {
  if (error instanceof Refusal && error.needsKey) return askForKey();
  hasAnswered = false;
  if (error instanceof Refusal) {
    setState("failing", error.message);
    return setTrouble("The worker answers, but can't say how it is. Figures may be old.");
  }
  setState("lost", "");
  const since = lastSeen ? ` Figures are from ${lastSeen.toLocaleTimeString()}.` : "";
  setTrouble(`${sentence(explain(error))}${since} Trying again every ${POLL_MS / 1000} seconds.`);
}

function setState(state, why) {
  const name = state === "lost" ? "Not connected" : (STATES[state] ?? state);
  byId("state").dataset.state = state;
  setText(byId("state"), why ? `${name}: ${why}` : name);
  document.title = `${name.split(":")[0]} · mlx-worker`;
}

function setTrouble(text) {
  setText(byId("trouble"), text);
  byId("trouble").hidden = text === "";
  document.body.classList.toggle("is-stale", text !== "");
}

// --- the key

function askForKey() {
  const isWrong = hasKey();
  forgetKey();
  setLocked(true);
  hasAnswered = false;
  setText(byId("key-error"), isWrong ? "The worker doesn't know this key." : "");
  byId("key").focus();
}

function useKey(event) {
  event.preventDefault();
  const isKept = keepKey(byId("key").value.trim());
  setText(byId("key-error"), isKept ? "" : "A key has visible ASCII characters only, no spaces.");
  if (!isKept) return;
  byId("key").value = "";
  setLocked(false);
  poll();
}

function setLocked(is) {
  isLocked = is;
  byId("key-form").hidden = !is;
  byId("main").hidden = is;
  setTrouble("");
  byId("state").dataset.state = is ? "locked" : "starting";
  setText(byId("state"), is ? "API key needed" : "Connecting…");
}

// --- start

byId("key-form").addEventListener("submit", useKey);
document.addEventListener("visibilitychange", () => {
  if (document.hidden) return;
  hasAnswered = false; // settings may have been changed elsewhere meanwhile
  poll();
});
onLibrary(showDownloads);
onLibrary(showCatalogue);
startInstall();
startRemove();
startPrompt();
startSettings();
poll();
