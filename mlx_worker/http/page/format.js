// Figures → words. undefined and null, which the worker says where nothing was measured, stay null.

const MINUS = "\u2212";
const UNITS = ["bytes", "kB", "MB", "GB", "TB"];

/** Lets a formatter see numbers only. */
function known(format) {
  return (value) => (Number.isFinite(value) ? format(value) : null);
}

function decimals(value, places) {
  return value.toLocaleString("en", { minimumFractionDigits: places, maximumFractionDigits: places });
}

export const count = known((value) => decimals(value, 0));
export const speed = known((value) => decimals(value, value < 100 ? 1 : 0));
export const ratio = known((value) => decimals(value, 2));
export const share = known((value) => `${decimals(100 * value, 0)} %`);

/** 0.24 → "+24%", −0.18 → "−18%": towards zero, as in the line of the status. */
export const change = known((fraction) => {
  const percent = Math.trunc(Number((100 * fraction).toFixed(9)));
  return `${percent < 0 ? MINUS : "+"}${Math.abs(percent)}%`;
});

export const bytes = known((value) => {
  const unit = unitOf(value);
  return `${inUnit(value, unit, value)} ${UNITS[unit]}`;
});

/** "3.2 of 6.8 GB, 48 %". */
export function bytesOf(value, whole) {
  const unit = unitOf(whole);
  const percent = whole > 0 ? Math.floor((100 * value) / whole) : 100;
  return `${inUnit(value, unit, whole)} of ${inUnit(whole, unit, whole)} ${UNITS[unit]}, ${percent} %`;
}

function unitOf(value) {
  let unit = 0;
  while (value >= 1000 && unit < UNITS.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return unit;
}

/** With as many decimals as `whole` has in that unit. */
function inUnit(value, unit, whole) {
  const size = 1000 ** unit;
  return decimals(value / size, unit > 0 && whole / size < 100 ? 1 : 0);
}

export const milliseconds = known((value) =>
  value < 1000 ? `${decimals(value, 0)} ms` : `${decimals(value / 1000, 1)} s`,
);

/** The two largest units of a span: "3 d 4 h", "5 min". */
export const span = known((seconds) => {
  const minutes = Math.floor(seconds / 60);
  const hours = Math.floor(minutes / 60);
  const days = Math.floor(hours / 24);
  if (days > 0) return `${days} d ${hours % 24} h`;
  if (hours > 0) return `${hours} h ${minutes % 60} min`;
  return minutes > 0 ? `${minutes} min` : `${Math.floor(seconds)} s`;
});

/** "1 request", "2 requests". */
export function counted(value, noun) {
  const number = count(value);
  return number && `${number} ${noun}${value === 1 ? "" : "s"}`;
}

/** A reason as a sentence: it comes as one, without its capital and full stop. */
export function sentence(text) {
  return text ? ended(text[0].toUpperCase() + text.slice(1)) : null;
}

/** The same for what may begin with a name, which stays as it is spelt. */
export function ended(text) {
  return !text || /[.!?]$/.test(text) ? text : `${text}.`;
}

/** null where any part is: so that half a line is never shown. */
export function joined(strings, ...values) {
  return values.some((value) => value === null || value === undefined)
    ? null
    : String.raw({ raw: strings }, ...values);
}
