// What is told of a model's draft: the line exactly as the worker has it, and the figures behind it.

import { change, counted, joined, ratio, sentence, share } from "./format.js";

/** No line at all without a text: there is no draft, or it isn't to be had. */
export function speculationOf(model) {
  if (!model.speculation) return [];
  const measured = model.measured ?? {};
  const basis = [counted(measured.requests, "request"), counted(measured.tokens, "token")];
  return [
    ["Speculative decoding", model.speculation],
    ["Why", sentence(measured.why)],
    ["90 % interval", joined`${change(measured.low)} to ${change(measured.high)}`],
    ["Depth", joined`${counted(measured.depth, "drafted token")} a round`],
    ["Acceptance", share(measured.acceptance)],
    ["Tokens per round", ratio(measured.tokens_per_round)],
    ["Measured on", basis.every(Boolean) && measured.requests > 0 ? basis.join(", ") : null],
  ];
}
