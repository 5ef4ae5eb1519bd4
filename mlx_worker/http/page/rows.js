// Lists that follow what they show: a row for each value, by its id.

/** Returns show(values). make(id) gives a row with its node as `item`, update(row, value) fills it. */
export function makeRows(list, make, update) {
  const rows = new Map();
  return (values) => {
    const ids = new Set(values.map((value) => value.id));
    for (const [id, row] of rows) if (!ids.has(id)) remove(rows, id, row);
    values.forEach((value, place) => {
      if (!rows.has(value.id)) rows.set(value.id, make(value.id));
      moveTo(list, rows.get(value.id).item, place);
      update(rows.get(value.id), value);
    });
  };
}

function remove(rows, id, row) {
  row.item.remove();
  rows.delete(id);
}

/** A row that is in its place is left there: moving it would take the focus away. */
function moveTo(list, item, place) {
  if (list.children[place] !== item) list.insertBefore(item, list.children[place] ?? null);
}
