// Try: one prompt, its reply as it is written, and what it took.

import { askForStream, explain } from "./api.js";
import { byId, element, setText } from "./dom.js";
import { counted, joined, milliseconds, sentence, share, speed } from "./format.js";

const PATH = "/v1/chat/completions";
const ENDS = { length: "stopped at the limit of tokens", stop: null };
let ongoing = null; // the AbortController of the reply being written

export function startPrompt() {
  byId("try-form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!ongoing) reply();
  });
  byId("stop").addEventListener("click", () => ongoing?.abort());
  byId("prompt").addEventListener("keydown", (event) => {
    const isSent = event.key === "Enter" && (event.ctrlKey || event.metaKey);
    if (isSent) byId("try-form").requestSubmit();
  });
}

/** A choice of model, where there is one. */
export function offerModels(models) {
  const select = byId("try-model");
  const ids = models.map((model) => model.id);
  const offered = [...select.options].map((option) => option.value);
  byId("try-model-choice").hidden = ids.length < 2;
  if (JSON.stringify(ids) === JSON.stringify(offered)) return;
  const chosen = select.value;
  select.replaceChildren(...ids.map((id) => element("option", { value: id }, id)));
  if (ids.includes(chosen)) select.value = chosen;
}

async function reply() {
  begin();
  try {
    await read(askForStream(PATH, bodyOfForm(), ongoing.signal));
  } catch (error) {
    showEnd(error);
  } finally {
    end();
  }
}

async function read(chunks) {
  for await (const chunk of chunks) {
    byId("reply").append(chunk.choices?.[0]?.delta?.content ?? "");
    if (chunk.usage) showTiming(chunk);
  }
}

function bodyOfForm() {
  const maxTokens = byId("max-tokens").valueAsNumber;
  return {
    ...(byId("try-model").value ? { model: byId("try-model").value } : {}),
    messages: [{ role: "user", content: byId("prompt").value }],
    stream: true,
    speculation: byId("speculation").value,
    ...(Number.isNaN(maxTokens) ? {} : { max_tokens: maxTokens }),
  };
}

function begin() {
  ongoing = new AbortController();
  setText(byId("try-error"), "");
  setText(byId("timing"), "");
  byId("reply").replaceChildren();
  byId("reply").setAttribute("aria-busy", "true");
  byId("reply-box").hidden = false;
  allow("stop", "send");
}

function end() {
  ongoing = null;
  byId("reply").setAttribute("aria-busy", "false");
  byId("reply").normalize();
  allow("send", "stop");
}

/** One of the two buttons for the other; the focus goes along, so that no key press is lost. */
function allow(id, other) {
  byId(id).disabled = false;
  if (document.activeElement === byId(other)) byId(id).focus();
  byId(other).disabled = true;
}

function showEnd(error) {
  if (error.name === "AbortError") setText(byId("timing"), "Stopped.");
  else setText(byId("try-error"), sentence(explain(error)));
}

function showTiming(chunk) {
  const timing = chunk.pendra?.timing ?? {};
  const parts = [
    joined`${speed(timing.tokens_per_second)} tokens per second`,
    joined`first token after ${milliseconds(timing.ttft_ms)}`,
    joined`acceptance ${share(timing.draft_acceptance_rate)}`,
    counted(chunk.usage.completion_tokens, "token"),
    ENDS[chunk.choices?.[0]?.finish_reason] ?? null,
    chunk.pendra?.notice?.message ?? null,
  ];
  setText(byId("timing"), parts.filter(Boolean).join(" · "));
}
