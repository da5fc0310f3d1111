// Elements, tables and figures. Text is only ever set as text: nothing that comes from the daemon is read as markup.

const SVG = "http://www.w3.org/2000/svg";

/** Return an element; `attributes` that are null are left out, children may be nodes, text or null. */
export function element(name, attributes = {}, ...children) {
  return furnish(document.createElement(name), attributes, children);
}

/** The same for an element of SVG. */
export function shape(name, attributes = {}, ...children) {
  return furnish(document.createElementNS(SVG, name), attributes, children);
}

function furnish(made, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null) made.setAttribute(key, value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null));
  return made;
}

/** Show nodes in a holder, changing only what differs: whoever reads or selects something there keeps his place. */
export function show(holder, ...nodes) {
  const wanted = element(holder.localName, {}, ...nodes);
  morphChildren(holder, wanted);
}

function morph(old, wanted) {
  if (old.nodeType !== wanted.nodeType || old.nodeName !== wanted.nodeName) {
    old.replaceWith(wanted);
  } else if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== wanted.data) old.data = wanted.data;
  } else {
    for (const { name } of [...old.attributes]) if (!wanted.hasAttribute(name)) old.removeAttribute(name);
    for (const { name, value } of wanted.attributes) {
      if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    }
    morphChildren(old, wanted);
  }
}

function morphChildren(old, wanted) {
  const [before, after] = [[...old.childNodes], [...wanted.childNodes]];
  after.forEach((node, place) => (place < before.length ? morph(before[place], node) : old.append(node)));
  before.slice(after.length).forEach((node) => node.remove());
}

/**
 * Return a table, the first column of which names the row. A column is of a `kind`: of numbers, or of long names.
 * Roles are given too: narrow screens lay the table out as blocks, and then not every browser knows it as one.
 */
export function table(caption, columns, rows) {
  return element("table", { role: "table" },
    element("caption", {}, caption),
    element("thead", { role: "rowgroup" }, element("tr", { role: "row" },
      columns.map((column) => element("th", { scope: "col", role: "columnheader", class: column.kind }, column.name)))),
    element("tbody", { role: "rowgroup" }, rows.map((cells) => element("tr", { role: "row" },
      cells.map((cell, place) => (place === 0
        ? element("th", { scope: "row", role: "rowheader", class: columns[0].kind }, cell)
        : element("td", { role: "cell", class: columns[place].kind, "data-column": columns[place].name },
          element("span", {}, cell))))))));
}

/** Return text beside the exact value it stands for. */
function exact(value, text) {
  return element("data", { value: String(value) }, text);
}

export const NONE = "–";

export function count(value) {
  return exact(value, value.toLocaleString("en"));
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export function bytesText(value) {
  const power = value < 1 ? 0 : Math.min(Math.floor(Math.log2(value) / 10), UNITS.length - 1);
  const scaled = value / 1024 ** power;
  return `${power === 0 || scaled >= 100 ? Math.round(scaled) : scaled.toPrecision(3)} ${UNITS[power]}`;
}

export function bytes(value) {
  return exact(value, bytesText(value));
}

export function ratio(raw, packed) {
  return packed ? exact(raw / packed, (raw / packed).toPrecision(3)) : NONE;
}

export function percentText(share) {
  return `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
}

export function share(part, whole) {
  return whole ? exact(part / whole, percentText(part / whole)) : NONE;
}

export function duration(seconds) {
  const minutes = Math.floor(seconds / 60);
  if (minutes < 1) return `${Math.floor(seconds)} s`;
  if (minutes < 120) return `${minutes} min`;
  return minutes < 2880 ? `${Math.floor(minutes / 60)} h` : `${Math.floor(minutes / 1440)} days`;
}

export function clock(date) {
  return date.toLocaleTimeString("en-GB");
}

/** Return the beginning of a key: enough to know it by. */
export function short(key) {
  return element("code", {}, key === null ? "unknown" : key.length > 16 ? `${key.slice(0, 16)}…` : key);
}
