// Sparklines: how fast the last requests were, and how much of their drafts was kept. A bar for each
// request, the oldest first; none where there was nothing to measure.

import { drawAnew, drawn, element } from "./dom.js";
import { share, speed } from "./format.js";

const BAR = 10; // the width of a bar and the gap after it, in the drawing's own units
const GAP = 3;
const HEIGHT = 100;
const FEWEST = 20; // places that a drawing has at least, so that few bars aren't broad
const MOST = 60;

/** rows: of the usage log, the newest first. */
export function showLines(place, rows) {
  const last = rows.slice(0, MOST).reverse();
  const speeds = last.map((row) => [row.tokens_per_second, row.draft_acceptance_rate !== null]);
  const shares = last.map((row) => [row.draft_acceptance_rate, true]);
  drawAnew(place, [speeds, shares], draw);
}

function draw(place, speeds, shares) {
  const figures = [
    figure("Tokens per second", speeds, (values) => Math.max(...values), speed),
    figure("Acceptance of drafts", shares, () => 1, share),
  ];
  place.replaceChildren(...figures.filter(Boolean));
}

/** bars: [value or null, whether it is drawn filled]; whole(values): what the full height stands for. */
function figure(title, bars, whole, format) {
  const values = bars.map(([value]) => value).filter((value) => value !== null);
  if (!values.length) return null;
  const most = format(Math.max(...values));
  const told = `last ${format(values.at(-1))}, lowest ${format(Math.min(...values))}, highest ${most}`;
  const view = `0 0 ${(BAR + GAP) * Math.max(bars.length, FEWEST)} ${HEIGHT}`;
  const name = `${title} of the last ${bars.length} requests: ${told}`;
  const attributes = { class: "sparkline", role: "img", viewBox: view, preserveAspectRatio: "none", "aria-label": name };
  const svg = drawn("svg", attributes, ...drawBars(bars, whole(values)));
  return element("div", {}, element("h3", {}, title), svg, element("p", { class: "quiet" }, told));
}

function drawBars(bars, whole) {
  return bars.flatMap(([value, isFilled], place) => {
    if (value === null) return [];
    const height = Math.max(2, (HEIGHT - 4) * (whole > 0 ? value / whole : 0));
    const x = place * (BAR + GAP) + GAP / 2;
    return [drawn("rect", { class: isFilled ? "drafted" : "plain", x, y: HEIGHT - height, width: BAR, height })];
  });
}
