// Who is signed in, and the form that asks for a key. The key goes from its field to the gateway and
// is nowhere kept: what stays is a cookie that no script can read.

import { Refusal, askAnyway, explain } from "./api.js";
import { byId, setText } from "./dom.js";
import { counted, ended, sentence } from "./format.js";

const PATH = "/api/v1/session";
const OTHERS = { mww_: "a worker's key", mwp_: "a platform key" };
const ASK_FOR_ONE = "An owner makes one that begins with mwk_ under Keys, or “mlx-worker gateway key create” does.";

class WrongKind extends Error {}

let me = null;

/** What the gateway says of whoever is signed in. */
export function whoAmI() {
  return me;
}

export function can(permission) {
  return me?.permissions.includes(permission) ?? false;
}

/** Throws Refusal with 401 for nobody; what fetch throws where the gateway is away. */
export async function recognise() {
  me = await askAnyway("/api/v1/me");
  return me;
}

/** onIn() is called after each sign-in, onOut() after each sign-out. */
export function startSession(onIn, onOut) {
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    signIn(onIn);
  });
  byId("sign-out").addEventListener("click", () => signOut(onOut));
}

/** reason: why a key is asked for; "" at the beginning. */
export function askForKey(reason) {
  me = null;
  setText(byId("key-reason"), reason);
  setText(byId("key-error"), "");
  byId("key").value = "";
  byId("key-form").hidden = false;
  byId("key").focus();
}

export function hideForm() {
  byId("key-form").hidden = true;
  byId("key").value = "";
}

async function signIn(onIn) {
  const key = byId("key").value.trim();
  const other = OTHERS[key.slice(0, 4)];
  byId("key").value = "";
  byId("key-send").disabled = true;
  setText(byId("key-error"), "");
  try {
    if (other) throw new WrongKind(other);
    await askAnyway(PATH, { method: "POST", body: { key } });
    await onIn();
  } catch (error) {
    setText(byId("key-error"), ended(refused(error)));
    byId("key").focus();
  } finally {
    byId("key-send").disabled = false;
  }
}

function refused(error) {
  if (error instanceof WrongKind) return `This is ${error.message}. ${ASK_FOR_ONE}`;
  if (!(error instanceof Refusal)) return sentence(explain(error));
  if (error.status === 401) {
    return `The gateway doesn't know this key, or it was revoked. ${ASK_FOR_ONE}`;
  }
  if (error.status !== 429) return sentence(explain(error));
  const wait = error.retryS === null ? "later" : `in ${counted(Math.ceil(error.retryS), "second")}`;
  return `Too many tries with wrong keys. Try again ${wait}.`;
}

async function signOut(onOut) {
  try {
    await askAnyway(PATH, { method: "DELETE" });
  } catch (error) {
    // A session that is over already is as good as ended.
    if (!(error instanceof Refusal) || error.status !== 401) return onOut(error);
  }
  onOut(null);
}
