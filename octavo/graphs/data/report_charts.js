// The drawings: the program along its layers, lifelines of buffers, buckets, the history of steps.

const FAMILIES = {
  attention: ["attend", "window_latent", "publish", "select", "select_candidates", "index_query", "commit_window"],
  experts: ["experts", "shared_expert", "combine"],
  mhc: ["mhc_site", "mhc_mix", "mhc_collapse", "mhc_expand", "stream_mean"],
  linear: ["linear", "linear_f8", "linear_f8_pair", "linear_f32", "grouped_linear"],
  norm: ["rms_norm"],
  engram: ["engram_gate", "engram_hash", "engram_lookup", "token_classes", "embed_tokens"],
};
const FAMILY_NAMES = {
  attention: "attention", experts: "experts", mhc: "mixing of streams (mHC)", linear: "linear", norm: "norm",
  engram: "Engram and embedding", other: "other operators", between: "what lies between operators",
};
const WIDE = new Set(["attend", "experts", "shared_expert", "engram_gate", "engram_hash", "engram_lookup",
  "embed_tokens", "window_latent", "index_query", "mhc_site", "mhc_mix", "grouped_linear"]);
/** Operators that get more room, and those of them whose names are always written. */
const WIDE_UNITS = 3;
const NAMED = new Set(["attend", "experts", "shared_expert"]);

function familyOf(call) {
  if (call.node) return "between";
  const found = Object.entries(FAMILIES).find(([, names]) => names.includes(call.operator));
  return found ? found[0] : "other";
}

/** A hue between blue and red for each kind of segment, so that breaks and collectives keep theirs. */
function tagFill(kind) {
  if (kind.kind !== "segment") return null;
  const hue = 205 + ((Number(kind.of.slice(1)) * 61) % 150);
  return `--fill: hsl(${hue} 38% var(--tag-light))`;
}

const callName = (call) => (call.region ? `${call.operator} (${call.region})` : call.operator ?? call.node);
/** For cells of the picture; the detail has the whole names. */
const SHORT = {
  mhc_site: "site", mhc_mix: "mix", linear_f8_pair: "pair", grouped_linear: "grouped", shared_expert: "shared", window_latent: "latent",
  index_query: "query", engram_gate: "engram", engram_hash: "hash", engram_lookup: "lookup", embed_tokens: "embed", commit_window: "commit",
  select_candidates: "candidates", "gather in global order": "gather", "gather rank by rank": "gather", "reduce-scatter": "reduce",
};
const shortName = (name) => SHORT[name] ?? name;

/** Instructions cut at layers: [layer or null, parts] in the order of execution. */
function layerRows() {
  const rows = new Map();
  for (const piece of facts().pieces) {
    const calls = kindOf(piece).calls;
    const places = [...new Set(calls.map((call) => Math.min(call.layer, Math.max(0, piece.layers.length - 1))))];
    for (const place of places.length ? places : [0]) {
      const layer = piece.layers[place] ?? null;
      const own = calls.filter((call) => Math.min(call.layer, Math.max(0, piece.layers.length - 1)) === place);
      if (!rows.has(layer)) rows.set(layer, []);
      rows.get(layer).push({ piece, layer, calls: own, first: place === places[0], last: place === places.at(-1) });
    }
  }
  return [...rows];
}

function partName(part) {
  if (part.piece.kind === "segment") return part.piece.of;
  const move = facts().collectives.find((each) => each.piece === part.piece.number);
  return move ? shortName(move.operation) : part.calls.map((call) => shortName(call.operator)).join(", ");
}

const TAG = 29, GAP = 5, PAD = 3, ROW = 27, LEFT = 44;
const nameWidth = (call) => 4.9 * shortName(call.operator).length + 3;

function cellWidth(call, unit) {
  if (!WIDE.has(call.operator)) return unit;
  return Math.max(WIDE_UNITS * unit, NAMED.has(call.operator) ? nameWidth(call) : 0);
}

function partWidth(part, unit) {
  if (part.piece.kind !== "segment") return 5.6 * partName(part).length + 14;
  return (part.first ? TAG : 10) + 2 * PAD + part.calls.reduce((sum, call) => sum + cellWidth(call, unit), 0);
}

const rowWidth = (parts, unit) => parts.reduce((sum, part) => sum + partWidth(part, unit) + GAP, 0);

/** The program as a picture -> groups by instruction number, in order. */
function drawLayers(box, onShow, onPin) {
  const rows = layerRows();
  const room = roomIn(box) - LEFT;
  let unit = 30;
  while (unit > 6 && rows.some(([, parts]) => rowWidth(parts, unit) > room)) unit -= 0.25;
  const root = drawing(room + LEFT, rows.length * ROW + 4, "Instructions along the layers");
  root.append(shape("defs", {},
    shape("pattern", { id: "hatch", width: 4, height: 4, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      shape("rect", { width: 1.6, height: 4, class: "box between" }))));
  const items = [];
  const lines = [];
  let widest = 0;
  rows.forEach(([layer, parts], line) => {
    const y = line * ROW + 2;
    const row = shape("g", { class: "row", "data-layer": layer ?? "" },
      label(LEFT - 10, y + 16, layer === null ? "–" : `L${layer}`, "layer soft end"));
    let x = LEFT;
    for (const part of parts) {
      const item = drawPart(part, x, y, unit);
      for (const event of ["pointerenter", "focus"]) item.addEventListener(event, () => onShow(part.piece));
      item.addEventListener("click", () => onPin(part.piece));
      item.addEventListener("keydown", (event) => {
        if (event.key === "Enter" || event.key === " ") {
          event.preventDefault();
          onPin(part.piece);
        }
      });
      x += partWidth(part, unit) + GAP;
      items.push(item);
      lines.push(line);
      row.append(item);
    }
    widest = Math.max(widest, x);
    root.append(row);
  });
  root.setAttribute("width", Math.max(widest, room));
  root.setAttribute("viewBox", `0 0 ${Math.max(widest, room)} ${rows.length * ROW + 4}`);
  box.replaceChildren(root);
  roving(root, items, lines);
}

function drawPart(part, x, y, unit) {
  const { piece } = part;
  const segment = piece.kind === "segment";
  const width = partWidth(part, unit);
  const name = `${piece.number}: ${piece.kind} ${piece.of}, ${layerSpan(piece.layers)}, ${piece.why}`;
  const item = shape("g", {
    class: `item ${piece.kind}`, role: "button", "aria-label": name, "data-piece": piece.number, "data-kind": piece.of,
    "data-layer": part.layer ?? "",
  });
  if (!segment) {
    item.append(shape("rect", { class: "frame", x, y, width, height: ROW - 5, rx: 4 }),
      shape("rect", { class: "box", x: x + 1.5, y: y + 1.5, width: width - 3, height: ROW - 8, rx: 3 }),
      label(x + width / 2, y + 15, partName(part), "in middle"));
    return item;
  }
  const tag = part.first ? TAG : 10;
  item.append(shape("rect", { class: "frame", x, y, width, height: ROW - 5, rx: 4 }),
    shape("rect", { class: "tag", style: tagFill(kindOf(piece)), x: x + 1, y: y + 1, width: tag, height: ROW - 7, rx: 3 }));
  if (part.first) item.append(label(x + 1 + tag / 2, y + 15, piece.of, "in tag-words middle"));
  let at = x + tag + PAD;
  for (const call of part.calls) {
    const wide = cellWidth(call, unit);
    item.append(shape("rect", {
      class: `cell ${familyOf(call)}`, x: at + 0.7, y: y + 4, width: Math.max(1, wide - 1.4), height: ROW - 13, rx: 1.5,
    }, shape("title", {}, callName(call))));
    if (call.region) item.append(shape("rect", { class: "under region", x: at + 0.7, y: y + 19, width: Math.max(1, wide - 1.4), height: 1.5 }));
    if (WIDE.has(call.operator) && nameWidth(call) <= wide)
      item.append(label(at + wide / 2, y + 14.5, shortName(call.operator), "in tiny middle"));
    at += wide;
  }
  return item;
}

const DEAD_ROWS = { carried: "carried: no live row reads them", zero: "zero", minus: "minus one", filled: "filled with the input's own" };
const deadRows = (buffer) => ["zero", "minus", "filled"].find((kind) => buffer.dead_rows.startsWith(kind)) ?? "carried";
const dims = (buffer) => `${buffer.dtype}${buffer.shape}`;

function bufferWords(buffer) {
  const writer = buffer.writer === "step inputs" ? "the step's inputs" : `instruction ${buffer.writer}`;
  const readers = buffer.readers.filter((reader) => reader !== "result");
  const result = buffer.readers.includes("result") ? ", and it is a result" : "";
  return `${buffer.name}: ${dims(buffer)}, ${size(buffer.bytes_per_row)} a row\nwritten by ${writer}, ` +
    `read by ${readers.length ? ranges(readers) : "none"}${result}\nstorage ${buffer.storage}; dead rows ${buffer.dead_rows}`;
}

const LANE = 15, NAMES = 236, TOP = 74, MOST_LANES = 150;

/** Lines of the chart: [name, buffers]: one for each storage, or one for each buffer that a search finds. */
function lanes() {
  if (search.on) return facts().buffers.filter(matchesBuffer).map((buffer) => [buffer.name, [buffer]]);
  const byName = new Map(facts().buffers.map((buffer) => [buffer.name, buffer]));
  return facts().storages.map((storage) => {
    const members = storage.buffers.map((name) => byName.get(name));
    const shared = members.length > 1 ? `${members.length} x ${dims(members[0])}` : storage.buffers[0];
    return [`${shared}, ${size(storage.bytes_per_row)}`, members];
  });
}

function drawLifelines(box, onPin) {
  const all = lanes();
  const shown = all.slice(0, MOST_LANES);
  const end = facts().pieces.length;
  const width = roomIn(box);
  const step = (width - NAMES - 12) / (end + 2);
  const x = (instruction) => NAMES + (instruction + 1) * step;
  const height = TOP + shown.length * LANE + 8;
  const root = drawing(width, height, "Lives of buffers over the instructions");
  drawAlive(root, x, step, end);
  drawLayerGrid(root, x, height);
  const items = [];
  const lines = [];
  shown.forEach(([name, buffers], line) => {
    const y = TOP + line * LANE + LANE / 2;
    const words = name.length > 38 ? `${name.slice(0, 36)}…` : name;
    root.append(label(NAMES - 8, y + 4, words, "soft end"), shape("line", { class: "grid", x1: NAMES, x2: width, y1: y, y2: y }));
    for (const buffer of buffers) {
      const [from, to] = [x(buffer.life[0]) + step * 0.15, x(Math.min(buffer.life[1], end)) + step * 0.85];
      const ticks = buffer.readers.map((reader) => `M${(x(reader === "result" ? end : reader) + step / 2).toFixed(1)} ${y - 3}v6`);
      const item = shape("g", { class: `item ${deadRows(buffer)}`, role: "img", "aria-label": bufferWords(buffer), "data-buffer": buffer.name },
        shape("line", { class: "life", x1: from, x2: Math.max(to, from + 1.5), y1: y, y2: y }),
        shape("path", { class: "ticks", d: ticks.join("") }),
        shape("circle", { class: "writer", cx: from, cy: y, r: 2.4 }));
      if (buffer.writer !== "step inputs") item.addEventListener("click", () => onPin(facts().pieces[buffer.writer]));
      items.push(withTip(item, () => bufferWords(buffer)));
      lines.push(line);
      root.append(item);
    }
  });
  root.append(shape("rect", { class: "cursor", id: "cursor", x: -99, y: 16, width: Math.max(3, step), height: height - 20 }));
  root.dataset.first = NAMES;
  root.dataset.step = step;
  const none = element("p", { class: "empty" }, "No buffer has such a name.");
  const rest = element("p", { class: "empty" }, `${all.length - shown.length} more: the table below has them all.`);
  box.replaceChildren(all.length ? root : none, ...(all.length > shown.length ? [rest] : []));
  roving(root, items, lines);
}

/** Bytes a row that are alive at each instruction, above the lifelines. */
function drawAlive(root, x, step, end) {
  const alive = Array.from({ length: end + 2 }, (_, place) =>
    facts().buffers.reduce((sum, b) => sum + (b.life[0] <= place - 1 && place - 1 <= b.life[1] ? b.bytes_per_row : 0), 0));
  const most = Math.max(...alive, 1);
  const [low, high] = [TOP - 12, 22];
  const path = alive.map((bytes, place) => `V${(low - (low - high) * bytes / most).toFixed(1)}h${step.toFixed(2)}`);
  root.append(shape("path", { class: "area", d: `M${x(-1)} ${low}${path.join("")}V${low}Z` }),
    label(NAMES - 8, high + 8, `at most ${size(most)} a row alive`, "soft end"),
    label(NAMES - 8, high + 22, `${size(facts().storages.reduce((s, b) => s + b.bytes_per_row, 0))} a row allocated`, "soft end"));
}

function drawLayerGrid(root, x, height) {
  const firsts = new Map();
  for (const piece of facts().pieces)
    for (const layer of piece.layers) if (!firsts.has(layer)) firsts.set(layer, piece.number);
  let last = -99;
  for (const [layer, number] of firsts) {
    root.append(shape("line", { class: "grid", x1: x(number), x2: x(number), y1: 16, y2: height }));
    if (x(number) - last < 26) continue;
    last = x(number);
    root.append(label(last, 11, `L${layer}`, "soft"));
  }
}

/** Where the instruction in focus stands among the lifelines. */
function moveCursor(number) {
  const cursor = byId("cursor");
  if (cursor === null) return;
  const { first, step } = cursor.parentNode.dataset;
  cursor.setAttribute("x", number === null ? -99 : Number(first) + (number + 1) * Number(step));
}

/** Small multiples over the buckets: padding, buffers, what is sent, steps that took each, what capturing took. */
function drawBuckets(box) {
  const { buckets } = facts();
  const steps = replaysByBucket();
  const panels = [
    { name: "padding at most, share of the bucket", value: (b) => b.most_padding_rows / b.rows, words: (v) => `${Math.round(100 * v)}%`, fill: "break" },
    { name: "bytes of buffers (logarithmic)", value: (b) => b.buffer_bytes, words: size, log: true, fill: "plain" },
    { name: "bytes sent by a rank (logarithmic)", value: (b) => b.collective_bytes_sent_per_rank, words: size, log: true, fill: "collective" },
    { name: "steps that took it", value: (b) => steps.get(b.rows) ?? 0, words: String, fill: "engram" },
    { name: "captured in, seconds", value: (b) => captureOf(b)?.seconds ?? 0, words: (v) => v.toFixed(2), fill: "mhc" },
    { name: "bytes by which the pool grew (logarithmic)", value: (b) => captureOf(b)?.pool_bytes ?? 0, words: size, log: true, fill: "experts" },
    { name: "bytes that the graphs take (logarithmic)", value: (b) => captureOf(b)?.graph_bytes ?? 0, words: size, log: true, fill: "linear" },
  ].filter((panel) => buckets.some((bucket) => panel.value(bucket) > 0));
  const width = roomIn(box), high = 74, each = high + 40;
  const column = Math.min(70, (width - 20) / buckets.length);
  const root = drawing(width, panels.length * each + 24, "Buckets");
  const items = buckets.map((bucket, place) => {
    const x = 10 + place * column;
    const item = shape("g", { class: "item column", role: "img", "aria-label": bucketWords(bucket, steps) },
      shape("rect", { class: "hit", x, y: 0, width: column, height: panels.length * each + 24 }),
      label(x + column / 2, panels.length * each + 12, bucket.rows.toLocaleString("en"), "middle"));
    panels.forEach((panel, line) => {
      const values = buckets.map(panel.value).filter((value) => value > 0);
      const [least, most] = [Math.min(...values) / 2, Math.max(...values)];
      const value = panel.value(bucket);
      const share = value <= 0 ? 0 : panel.log ? Math.log(value / least) / Math.log(most / least) : value / most;
      const base = (line + 1) * each - 6;
      item.append(shape("rect", { class: `box ${panel.fill}`, x: x + 3, y: base - high * share * 0.82, width: column - 6, height: high * share * 0.82, rx: 2 }),
        label(x + column / 2, base - high * share * 0.82 - 3, panel.words(value).replace(" ", "\u2009"), "middle soft"));
    });
    return withTip(item, () => bucketWords(bucket, steps));
  });
  root.append(...items);
  panels.forEach((panel, line) => root.append(label(10, line * each + 14, panel.name)));
  box.replaceChildren(root);
  roving(root, items);
}

function bucketWords(bucket, steps) {
  const sent = bucket.collective_bytes_sent_per_rank;
  const least = bucket.rows - bucket.most_padding_rows;
  return `${bucket.rows.toLocaleString("en")} rows, taken by steps of ${least.toLocaleString("en")} rows and more\n` +
    `padding at most ${counted(bucket.most_padding_rows, "row")}, ${percent(bucket.most_padding_rows / bucket.rows)}\n` +
    `buffers ${size(bucket.buffer_bytes)}` + (sent ? `, a rank sends ${size(sent)}` : "") +
    (steps.size ? `\n${counted(steps.get(bucket.rows) ?? 0, "step")} of the history` : "") + captureWords(captureOf(bucket));
}

const captureOf = (bucket) => measured()?.captures.find((capture) => capture.rows === bucket.rows) ?? null;
const captureWords = (capture) => (capture === null ? "" : `\n${counted(capture.segments, "CUDA graph")} captured in ` +
  `${capture.seconds.toFixed(2)} s; the pool grew by ${size(capture.pool_bytes)}, the graphs take ${size(capture.graph_bytes)}`);

/** Steps by bucket, which is that of prelude and body: the epilogue has a ladder of its own. */
function replaysByBucket() {
  const counts = new Map();
  if (state.program === "epilogue") return counts;
  for (const step of FACTS.replays) if (step.bucket !== null) counts.set(step.bucket, (counts.get(step.bucket) ?? 0) + 1);
  return counts;
}

/** Steps over time: rows above, milliseconds below. */
function drawHistory(box) {
  const steps = FACTS.replays;
  const width = roomIn(box), left = 70, high = 130, each = high + 34;
  const root = drawing(width, 2 * each + 18, "History of steps");
  const panels = [["rows", (step) => step.rows], ["milliseconds", (step) => step.microseconds / 1000]];
  const x = (place) => left + (width - left - 14) * (steps.length > 1 ? place / (steps.length - 1) : 0.5);
  const scales = panels.map(([name, value], line) => {
    const values = steps.map(value).filter((each) => each > 0);
    const [least, most] = [Math.min(...values), Math.max(...values)];
    const y = (v) => line * each + 24 + high - high * Math.log(Math.max(v, least) / least) / Math.log(Math.max(most / least, 1.01));
    root.append(label(left, line * each + 12, `${name} (logarithmic)`));
    for (const v of new Set([least, Math.sqrt(least * most), most])) {
      root.append(shape("line", { class: "grid", x1: left, x2: width, y1: y(v), y2: y(v) }),
        label(left - 8, y(v) + 4, (v < 10 ? Number(v.toPrecision(2)) : Math.round(v)).toLocaleString("en"), "soft end"));
    }
    return y;
  });
  const items = steps.map((step, place) => {
    const item = shape("g", { class: `item ${step.bucket === null ? "bad" : "plain"}`, role: "img", "aria-label": stepWords(step) });
    panels.forEach(([, value], line) =>
      item.append(shape("circle", { class: "dot", cx: x(place), cy: scales[line](value(step)), r: 3 })));
    return withTip(item, () => stepWords(step));
  });
  root.append(...items, label(left, 2 * each + 14, `step ${steps[0].step}`, "soft"),
    label(width - 14, 2 * each + 14, `step ${steps.at(-1).step}`, "soft end"));
  box.append(element("div", { class: "drawing" }, root));
  roving(root, items);
}

const stepWords = (step) =>
  `step ${step.step}: ${counted(step.rows, "row")}, ${(step.microseconds / 1000).toFixed(2)} ms\n` +
  (step.bucket === null ? `not replayed: ${step.not_replayed}` : `bucket ${step.bucket}, ${counted(step.bucket - step.rows, "row")} of padding`);
