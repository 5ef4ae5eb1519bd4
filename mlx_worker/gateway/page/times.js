// Times → words, in the zone and manner of whoever looks.

/** seconds or a text of ISO 8601 → "14:02:07", with its day where that isn't today; null stays. */
export function moment(value) {
  if (value === null || value === undefined) return null;
  const time = dateOf(value);
  const isToday = time.toDateString() === new Date().toDateString();
  const clock = time.toLocaleTimeString();
  return isToday ? clock : `${time.toLocaleDateString()} ${clock}`;
}

export function day(value) {
  return value === null || value === undefined ? null : dateOf(value).toLocaleDateString();
}

function dateOf(value) {
  return new Date(typeof value === "number" ? value * 1000 : value);
}
