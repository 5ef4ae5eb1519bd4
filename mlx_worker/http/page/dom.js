// Nodes of the page. Text becomes text nodes and nothing else: names of models, their replies and
// messages of errors are not ours, so none of it is ever read as markup.

const SVG = "http://www.w3.org/2000/svg";

export function byId(id) {
  return document.getElementById(id);
}

/** children: nodes or texts. */
export function element(name, attributes = {}, ...children) {
  return furnished(document.createElement(name), attributes, children);
}

export function drawn(name, attributes = {}, ...children) {
  return furnished(document.createElementNS(SVG, name), attributes, children);
}

function furnished(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** Leaves a text that is the same alone, so that nothing is read out again. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Calls draw(...values) only where a value differs from those that the node was last drawn with. */
export function drawAnew(node, values, draw) {
  const key = JSON.stringify(values);
  if (lastDrawn.get(node) === key) return;
  lastDrawn.set(node, key);
  draw(node, ...values);
}

const lastDrawn = new WeakMap();

/** rows: [term, ...what it is], each in a div of its own. */
export function describe(list, rows) {
  const made = rows.map(([term, ...told]) =>
    element("div", {}, element("dt", {}, term), element("dd", {}, ...told)),
  );
  list.replaceChildren(...made);
}
