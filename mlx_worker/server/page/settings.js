// Settings: what may be switched while the worker runs. The worker's answer is what is shown.

import { ask, explain } from "./api.js";
import { byId, setText } from "./dom.js";
import { sentence } from "./format.js";

const PATH = "/api/settings";
let inForce = null;
let turn = Promise.resolve(); // requests go one after the other, so that the last answer is the newest

export function startSettings() {
  byId("settings-form").addEventListener("submit", (event) => event.preventDefault());
  byId("speculative-decoding").addEventListener("change", (event) => {
    save({ speculative_decoding: event.target.value }, "Speculative decoding", event.target);
  });
  byId("kv-prefix-cache").addEventListener("change", (event) => {
    save({ kv_prefix_cache: event.target.value === "on" }, "KV prefix cache", event.target);
  });
  byId("run-together").addEventListener("change", (event) => {
    const changes = { run_requests_together: event.target.value === "on" };
    save(changes, "Run requests together", event.target);
  });
}

export function loadSettings() {
  return inTurn(async () => {
    try {
      show(await ask(PATH));
      tell("", "");
    } catch (error) {
      tell("", `Settings can't be read: ${explain(error)}`);
    }
  });
}

/** Says where the choice changes nothing, and why. */
export function noteSpeculation(status) {
  const problem = status.settings_problem;
  setText(byId("speculative-note"), problem ? troubleOf(problem, status) : noteFor(status));
  byId("speculative-decoding").options[0].text = isUnused(status) ? "Automatic (not in use)" : "Automatic";
}

/** A file that can't be read counts as Off; a change that couldn't be written changed nothing. */
function troubleOf(problem, status) {
  const isOff = status.settings?.speculative_decoding === "off";
  return isOff ? `Drafting is off: ${problem}` : `The last change was not kept: ${problem}`;
}

function isUnused(status) {
  return Boolean(status.paused) || isOffByPlatform(status) || isUnavailable(status);
}

function isOffByPlatform(status) {
  return status.platform?.speculative_decoding === "off";
}

function isUnavailable(status) {
  return status.platform?.speculative_decoding === "unavailable";
}

function save(changes, name, control) {
  return inTurn(async () => {
    try {
      show(await ask(PATH, { method: "PATCH", body: changes }));
      tell(`${name}: ${control.selectedOptions[0].text}, from the next request on`, "");
    } catch (error) {
      show(inForce);
      tell("", `${name} was not changed: ${explain(error)}`);
    }
  });
}

function inTurn(work) {
  turn = turn.then(work);
  return turn;
}

function show(settings) {
  inForce = settings;
  byId("speculative-decoding").value = settings.speculative_decoding;
  byId("kv-prefix-cache").value = settings.kv_prefix_cache ? "on" : "off";
  byId("run-together").value = settings.run_requests_together ? "on" : "off";
  byId("settings").disabled = false;
}

function tell(done, error) {
  setText(byId("settings-done"), sentence(done) ?? "");
  setText(byId("settings-error"), sentence(error) ?? "");
}

function noteFor(status) {
  const loaded = (status.models ?? []).filter((model) => model.is_loaded);
  if (isUnavailable(status)) return "Not offered to this worker's organisation; this choice is kept.";
  if (isOffByPlatform(status)) {
    const name = status.platform.display_name;
    return `Switched off by ${name}; this choice is kept, and applies once it is back on.`;
  }
  if (loaded.length && loaded.every((model) => !model.draft)) {
    return "No loaded model has a draft, so this changes nothing now.";
  }
  if (status.paused) {
    return "Automatic is not in use while Run requests together is on; this choice is kept.";
  }
  return "Automatic: drafts are used where they are measured to be faster.";
}
