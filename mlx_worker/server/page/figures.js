// Live figures: who is served now, and how the last replies went.

import { byId, describe, drawAnew, drawn, element, setText } from "./dom.js";
import { count, counted, milliseconds, share, speed } from "./format.js";

const BAR = 10; // the width of a bar and the gap after it, in the drawing's own units
const GAP = 3;
const HEIGHT = 100;

export function showFigures(status) {
  const recent = status.recent ?? [];
  drawAnew(byId("figures"), [tilesOf(status, recent)], drawTiles);
  const timed = recent.filter((reply) => reply.tokens_per_s !== null);
  byId("speeds").hidden = timed.length === 0;
  byId("no-replies").hidden = timed.length > 0;
  drawAnew(byId("sparkline"), [timed], drawSpeeds);
}

/** [what, figure, note] each. */
function tilesOf(status, recent) {
  const queue = status.queue ?? {};
  const limit = count(queue.limit);
  return [
    ["Running", count(queue.running) ?? "–", ""],
    ["Waiting", count(queue.waiting) ?? "–", limit ? `of ${limit} at most` : ""],
    ["Acceptance", ...acceptanceOf(recent)],
    ["First token", ...firstTokenOf(recent)],
  ];
}

function acceptanceOf(recent) {
  const drafted = recent.filter((reply) => reply.acceptance !== null);
  const mean = drafted.reduce((sum, reply) => sum + reply.acceptance, 0) / drafted.length;
  const note = `mean of ${counted(drafted.length, "drafted reply").replace("replys", "replies")}`;
  return drafted.length ? [share(mean), note] : ["–", "no drafted reply yet"];
}

function firstTokenOf(recent) {
  const waits = recent.map((reply) => reply.ttft_ms).filter((ms) => ms !== null);
  return waits.length ? [milliseconds(median(waits)), "median, from submit"] : ["–", ""];
}

function drawTiles(list, tiles) {
  describe(
    list,
    tiles.map(([what, figure, note]) => [what, figure, element("small", {}, note)]),
  );
}

function drawSpeeds(svg, replies) {
  if (!replies.length) return;
  const most = Math.max(...replies.map((reply) => reply.tokens_per_s));
  svg.setAttribute("viewBox", `0 0 ${(BAR + GAP) * Math.max(replies.length, 20)} ${HEIGHT}`);
  svg.replaceChildren(...replies.map((reply, place) => bar(reply, place, most)));
  const drafted = summary("drafted", replies.filter((reply) => reply.is_drafted));
  const plain = summary("plain", replies.filter((reply) => !reply.is_drafted));
  setText(byId("drafted-legend"), drafted);
  setText(byId("plain-legend"), plain);
  const last = speed(replies.at(-1).tokens_per_s);
  setText(byId("scale"), `Last ${last}, highest ${speed(most)}; the oldest of ${replies.length} first`);
  svg.setAttribute("aria-label", `Tokens per second of the last replies: ${drafted}; ${plain}`);
}

function bar(reply, place, most) {
  const height = Math.max(2, (HEIGHT - 4) * (reply.tokens_per_s / most));
  return drawn("rect", {
    class: reply.is_drafted ? "drafted" : "plain",
    x: place * (BAR + GAP) + GAP / 2,
    y: HEIGHT - height,
    width: BAR,
    height,
  });
}

/** "drafted: 12, median 58.1" */
function summary(kind, replies) {
  if (!replies.length) return `${kind}: none`;
  const middle = speed(median(replies.map((reply) => reply.tokens_per_s)));
  return `${kind}: ${replies.length}, median ${middle}`;
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = Math.floor(sorted.length / 2);
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}
