// What the other scripts share: the facts, words and numbers for people, elements, and the search.

const FACTS = JSON.parse(document.getElementById("facts").textContent);
const state = { program: Object.keys(FACTS.programs)[0], query: "", pinned: null };

const byId = (id) => document.getElementById(id);
const facts = () => FACTS.programs[state.program];
/** What a start measured of the program, or null where none was started. */
const measured = () => FACTS.measured[state.program] ?? null;

// ---- words and numbers ----

function size(bytes) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let unit = 0;
  while (bytes >= 999.5 && unit < units.length - 1) {
    bytes /= 1000;
    unit += 1;
  }
  return unit === 0 ? `${Math.round(bytes)} B` : `${Number(bytes.toPrecision(3))} ${units[unit]}`;
}

const counted = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
const percent = (share) => `${(100 * share).toFixed(1)} %`;

/** "0-3, 7" for 0, 1, 2, 3, 7. */
function ranges(numbers) {
  const runs = [];
  for (const number of [...new Set(numbers)].sort((a, b) => a - b)) {
    const last = runs[runs.length - 1];
    if (last && number === last[1] + 1) last[1] = number;
    else runs.push([number, number]);
  }
  return runs.map(([low, high]) => (low === high ? `${low}` : `${low}-${high}`)).join(", ");
}

const layerSpan = (layers) =>
  layers.length === 0 ? "outside of layers" : `layer${new Set(layers).size === 1 ? "" : "s"} ${ranges(layers)}`;

// ---- elements ----

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

const element = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const shape = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
const label = (x, y, words, kind = "") => shape("text", { x, y, class: kind }, words);

function drawing(width, height, name) {
  return shape("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": name });
}

/** Width for a drawing inside of a box, whose padding and scroll bar are taken off. */
const roomIn = (box) => Math.max(640, box.clientWidth - 32);

/** A table; cells are strings, numbers or elements; `columns` are [heading, class]. */
function table(columns, rows) {
  const head = element("tr", {}, ...columns.map(([name, kind]) => element("th", { class: kind, scope: "col" }, name)));
  const body = rows.map((cells) =>
    element("tr", {}, ...cells.map((cell, place) => element("td", { class: columns[place][1] }, marked(cell)))));
  return element("table", {}, element("thead", {}, head), element("tbody", {}, ...body));
}

// ---- a tip beside what the pointer or the focus is on ----

function tip(words, box) {
  const node = byId("tip");
  node.hidden = words === null;
  if (words === null) return;
  node.textContent = words;
  const own = node.getBoundingClientRect();
  const left = Math.min(Math.max(8, box.left + box.width / 2 - own.width / 2), innerWidth - own.width - 8);
  const below = box.bottom + 8 + own.height < innerHeight;
  node.style.left = `${left}px`;
  node.style.top = `${below ? box.bottom + 8 : Math.max(8, box.top - own.height - 8)}px`;
}

/** Show `words()` while the pointer or the focus is on the node. */
function withTip(node, words) {
  const show = () => {
    const box = node.getBoundingClientRect();
    tip(words(), box);
  };
  for (const event of ["pointerenter", "focus"]) node.addEventListener(event, show);
  for (const event of ["pointerleave", "blur"]) node.addEventListener(event, () => tip(null));
  return node;
}

/**
 * One stop of the Tab key for all items, arrow keys between them. Left and Right follow the order; Up and Down go to the
 * nearest item of the neighbouring line. Items that are dimmed are passed over by Home and End alone.
 */
function roving(root, items, lines = null) {
  let here = 0;
  const go = (place) => {
    if (place < 0 || place >= items.length) return;
    items[here].setAttribute("tabindex", "-1");
    here = place;
    items[here].setAttribute("tabindex", "0");
    items[here].focus();
  };
  const vertical = (step) => {
    if (lines === null) return here;
    const target = lines[here] + step;
    const middle = (node) => {
      const box = node.getBBox();
      return box.x + box.width / 2;
    };
    const from = middle(items[here]);
    const candidates = items.map((_, place) => place).filter((place) => lines[place] === target);
    candidates.sort((a, b) => Math.abs(middle(items[a]) - from) - Math.abs(middle(items[b]) - from));
    return candidates.length ? candidates[0] : here;
  };
  items.forEach((item, place) => {
    item.setAttribute("tabindex", place === 0 ? "0" : "-1");
    item.addEventListener("focus", () => {
      items[here].setAttribute("tabindex", "-1");
      here = place;
      item.setAttribute("tabindex", "0");
    });
  });
  root.addEventListener("keydown", (event) => {
    const moves = {
      ArrowLeft: () => here - 1, ArrowRight: () => here + 1, ArrowUp: () => vertical(-1),
      ArrowDown: () => vertical(1), Home: () => 0, End: () => items.length - 1,
    };
    if (!(event.key in moves) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    go(moves[event.key]());
  });
}

// ---- search ----

/** Words that must all be there, and ranges of layers of which each must be met. */
function parsed(query) {
  const words = [];
  const layers = [];
  for (const token of query.toLowerCase().replace(/\blayers?\s+(?=\d)/g, "").split(/\s+/).filter(Boolean)) {
    const range = /^l?(\d+)(?:-l?(\d+))?$/.exec(token);
    if (range) layers.push([Number(range[1]), Number(range[2] ?? range[1])]);
    else words.push(token);
  }
  return { words, layers, on: words.length + layers.length > 0 };
}

let search = parsed("");

const inLayers = (layers) => search.layers.every(([low, high]) => layers.some((n) => low <= n && n <= high));
const hasWords = (text) => search.words.every((word) => text.toLowerCase().includes(word));

/** The layer that a name says: L3.attend, layers.3.attn.wo_a.weight. */
function layersOfName(name) {
  const found = /^(?:L|layers\.)(\d+)\./.exec(name);
  return found ? [Number(found[1])] : [];
}

const kindOf = (piece) => facts().kinds.find((kind) => kind.of === piece.of);

function matchesPiece(piece) {
  if (!inLayers(piece.layers)) return false;
  if (search.words.length === 0) return true;
  const names = [...piece.inputs.map((input) => input.name), ...piece.writes, ...piece.updates];
  // With a layer in the search, a name must be of that layer, or of none.
  const own = names.filter((name) => layersOfName(name).length === 0 || inLayers(layersOfName(name)));
  return hasWords([piece.of, piece.kind, ...Object.keys(kindOf(piece).operators), ...own].join("\n"));
}

const matchesBuffer = (buffer) => inLayers(layersOfName(buffer.name)) && hasWords(buffer.name);
const matchesRegion = (region) => inLayers(region.layers) && hasWords(`${region.of}\n${region.name}`);
const matchesMove = (move) =>
  inLayers(move.layers) && hasWords([move.operation, move.why, ...move.values, ...move.readers].join("\n"));

/** Text with the words of the search marked; what is no text stays as it is. */
function marked(cell) {
  if (cell instanceof Node) return cell;
  const text = String(cell ?? "");
  const found = search.words.filter((word) => text.toLowerCase().includes(word));
  if (found.length === 0) return document.createTextNode(text);
  const whole = document.createDocumentFragment();
  const pattern = new RegExp(`(${found.map((word) => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).join("|")})`, "gi");
  text.split(pattern).forEach((part, place) => whole.append(place % 2 ? element("mark", {}, part) : part));
  return whole;
}
