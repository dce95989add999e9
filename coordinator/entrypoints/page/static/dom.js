// Elements and numbers. Text reaches the page as text nodes only, never as markup.

export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

// A table that scrolls on its own; `rows` is its body.
export function table(label, columns, rows, name = "") {
  const head = el("tr", {}, ...columns.map((column) => el("th", { scope: "col" }, column)));
  const body = rows instanceof Node ? rows : el("tbody", {}, ...rows);
  const attributes = { class: `scroll ${name}`, tabindex: 0, role: "group", "aria-label": label };
  return el("div", attributes, el("table", {}, el("thead", {}, head), body));
}

// Offers these names, unless they are offered already. The choice stays if it is among them.
export function offer(select, names) {
  if ([...select.options].map((one) => one.value).join("\n") === names.join("\n")) return;
  const before = select.value;
  select.replaceChildren(...names.map((name) => el("option", { value: name }, name)));
  if (names.includes(before)) select.value = before;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function number(value, digits = 0) {
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

export function milliseconds(value) {
  if (value === null || value === undefined) return "none";
  if (value >= 10000) return `${number(value / 1000, 1)} s`;
  return `${number(value, value && value < 100 ? 1 : 0)} ms`;
}

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${number(value, unit ? 1 : 0)} ${units[unit]}`;
}

export function percent(share) {
  const digits = share === 0 || share >= 0.1 ? 0 : share >= 0.01 ? 1 : 2;
  return `${number(share * 100, digits)}%`;
}

export function clock(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString("en-GB");
}

// The rows of a table that the coordinator sent with its columns, as objects.
export function objects(columns, rows) {
  return rows.map((row) => Object.fromEntries(columns.map((name, index) => [name, row[index]])));
}
