// The rest of the page: summary, detail of an instruction, tables, passes; programs, search and keys.

// ---- summary and legends ----

function drawSummary() {
  const report = facts();
  const count = (kind) => report.pieces.filter((piece) => piece.kind === kind).length;
  const top = report.buckets.at(-1);
  const layers = [...new Set(report.pieces.flatMap((piece) => piece.layers))];
  const unshared = report.buffers.reduce((sum, buffer) => sum + buffer.bytes_per_row, 0);
  const shared = report.storages.reduce((sum, storage) => sum + storage.bytes_per_row, 0);
  const seconds = Object.entries(FACTS.timings[state.program] ?? {}).filter(([name]) => !name.startsWith("pass "));
  const backends = Map.groupBy ? [...Map.groupBy(Object.entries(report.backends), ([, backend]) => backend)] : [];
  const tiles = [
    ["instructions", report.pieces.length, `${counted(count("segment"), "segment")}, ${counted(count("break"), "break")}, ${counted(count("collective"), "collective")}`],
    ["kinds of them", report.kinds.length, `${counted(report.kinds.reduce((sum, kind) => sum + kind.nodes * kind.count, 0), "node")} in all`],
    ["layers", layers.length, layers.length ? ranges(layers) : "none of its own"],
    ["ranks", report.ranks, `${report.rows} rows, on ${report.device}`],
    ["buffers", report.buffers.length, `in ${counted(report.storages.length, "storage")}`],
    ["bytes a row", size(shared), `${size(unshared)} without sharing`],
    ["largest bucket", top.rows.toLocaleString("en"), `${size(top.buffer_bytes)} of buffers`],
    ["seconds to build", seconds.reduce((sum, [, value]) => sum + value, 0).toFixed(1), seconds.map(([name, value]) => `${name} ${value.toFixed(1)}`).join(", ")],
    ["backends", backends.length || "-", backends.map(([name, members]) => `${name} x ${members.length}`).join(", ")],
    ["plan hash", element("code", {}, report.plan_hash), "equal on all ranks"],
    ...startTiles(),
  ];
  const words = [...new Set([...FACTS.title, ...report.title])];
  byId("summary").replaceChildren(
    element("p", {}, ...words.flatMap((line) => [line, element("br")])),
    element("dl", { class: "facts" }, ...tiles.map(([name, value, more]) =>
      element("div", {}, element("dt", {}, name), element("dd", {}, value, element("small", {}, more))))));
}

const swatch = (kind, words) => element("span", { class: kind }, element("i"), words);

function drawLegends() {
  const used = new Set(facts().kinds.filter((kind) => kind.kind === "segment").flatMap((kind) => kind.calls.map(familyOf)));
  const kinds = facts().kinds.map((kind) =>
    element("button", {
      class: `chip ${kind.kind}`, style: tagFill(kind), type: "button", "aria-pressed": String(state.query === kind.of), title: kind.why,
      onclick: () => find(state.query === kind.of ? "" : kind.of),
    }, element("b", {}, "\u25a0 "), `${kind.of} x ${kind.count}`));
  byId("legend").replaceChildren(
    ...Object.keys(FAMILY_NAMES).filter((family) => used.has(family)).map((family) => swatch(family, FAMILY_NAMES[family])),
    ...(facts().regions.length ? [swatch("region", "underlined: a region")] : []),
    swatch("break", "break: called, cannot be captured"),
    ...(facts().collectives.length ? [swatch("collective", "collective: rows move between ranks")] : []),
    element("span", { class: "gap" }), "Kinds:", ...kinds);
  byId("buffer-legend").replaceChildren("Dead rows:", ...Object.entries(DEAD_ROWS).map(([kind, words]) => swatch(kind, words)));
}

// ---- one instruction in words ----

function showDetail(piece) {
  const box = byId("detail");
  for (const item of document.querySelectorAll("#layers .item"))
    item.classList.toggle("current", piece !== null && item.dataset.piece === String(piece.number));
  moveCursor(piece === null ? null : piece.number);
  if (piece === null) {
    box.replaceChildren(element("p", { class: "empty" }, "Point at an instruction, or walk to it with Tab and the arrow keys: " +
      "here is what it reads and writes, and why it begins and ends where it does."));
    return;
  }
  const kind = kindOf(piece);
  const buffers = new Map(facts().buffers.map((buffer) => [buffer.name, buffer]));
  const move = facts().collectives.find((each) => each.piece === piece.number);
  const named = (name, more = "") => element("li", {},
    element("button", { class: "link name", type: "button", onclick: () => find(name) }, name), element("small", {}, more));
  const sized = (name) => {
    const buffer = buffers.get(name);
    return named(name, buffer ? `${dims(buffer)}, ${buffer.writer === "step inputs" ? "input" : `from ${buffer.writer}`}` : "");
  };
  const list = (title, entries) => (entries.length ? [element("h4", {}, title), element("ul", {}, ...entries)] : []);
  const from = (...sources) => piece.inputs.filter((input) => sources.includes(input.from)).map((input) => input.name);
  const read = from("buffer");
  box.replaceChildren(
    element("h3", {}, `${piece.number}. ${piece.kind} ${piece.of}`),
    element("div", { class: "empty" }, `${layerSpan(piece.layers)}; one of ${kind.count}; ${counted(kind.nodes, "node")}`),
    element("p", { class: `why ${piece.kind === "segment" ? "plain" : piece.kind}` }, piece.why),
    ...(move ? [element("p", {}, `A rank brings ${size(move.bytes_in_per_row)} a row, has ${size(move.bytes_out_per_row)} afterwards, sends ${size(move.bytes_sent_per_row)}.`)] : []),
    ...list(`reads ${counted(read.length, "buffer")}, ${size(kind.buffer_bytes_in_per_row)} a row`, read.map(sized)),
    ...list(`writes ${counted(piece.writes.length, "buffer")}, ${size(kind.buffer_bytes_out_per_row)} a row`,
      piece.writes.map((name) => named(name, dims(buffers.get(name))))),
    ...list("updates in place", piece.updates.map((name) => named(name))),
    ...list("operators in order, with their regions", [element("li", {}, kind.calls.map(callName).join(" \u2192 "))]),
    ...list(`pools, ${size(kind.pool_bytes)}`, from("pool").map((name) => named(name))),
    ...list(`weights and constants, ${size(kind.weight_bytes)}`, from("weight", "constant").map((name) => named(name))),
    ...list("live values", from("live").map((name) => named(name))));
}

function pin(piece) {
  state.pinned = state.pinned === piece ? null : piece;
  for (const item of document.querySelectorAll("#layers .item"))
    item.classList.toggle("pinned", state.pinned !== null && item.dataset.piece === String(state.pinned.number));
  showDetail(state.pinned ?? piece);
}

// ---- tables ----

const number = (heading) => [heading, "number"];
const text = (heading) => [heading, ""];
const name = (heading) => [heading, "name"];

function drawKinds() {
  byId("kind-table").replaceChildren(table(
    [name("kind"), text("is a"), number("count"), text("layers"), number("nodes"), number("in, a row"), number("out, a row"), number("weights"), text("why"), text("operators in order")],
    facts().kinds.filter((kind) => !search.on || facts().pieces.some((piece) => piece.of === kind.of && matchesPiece(piece))).map((kind) => [
      kind.of, kind.kind, kind.count, ranges(kind.layers) || "-", kind.nodes, size(kind.buffer_bytes_in_per_row),
      size(kind.buffer_bytes_out_per_row), size(kind.weight_bytes), kind.why,
      kind.calls.map((call) => call.operator ?? call.node).join(" "),
    ])));
}

function drawCollectives() {
  const moves = facts().collectives;
  const shown = moves.filter(matchesMove);
  const sent = shown.reduce((sum, move) => sum + move.bytes_sent_per_row, 0);
  const top = facts().buckets.at(-1);
  const words = moves.length === 0 ? "None: no rows move between ranks." :
    `${counted(shown.length, "collective")}${search.on ? " found" : ""}; a rank sends ${size(sent)} a row in them, ` +
    `${size(sent * top.rows)} in the largest bucket. All ranks run them in this order.`;
  byId("collective-list").replaceChildren(element("p", { class: "lead" }, words), ...(shown.length === 0 ? [] : [
    element("div", { class: "table", tabindex: "0" }, table(
      [number("instruction"), text("layers"), text("operation"), name("values"), number("brought"), number("received"), number("sent, a row"), text("why")],
      shown.map((move) => [move.piece, ranges(move.layers) || "-", move.operation, move.values.join(", "), size(move.bytes_in_per_row),
        size(move.bytes_out_per_row), size(move.bytes_sent_per_row), move.why]))),
  ]));
}

function drawBufferTable(box) {
  const shown = facts().buffers.filter((buffer) => !search.on || matchesBuffer(buffer));
  box.replaceChildren(table(
    [name("buffer"), name("shape"), number("a row"), text("writer"), text("readers"), number("storage"), text("dead rows")],
    shown.map((buffer) => [buffer.name, dims(buffer), size(buffer.bytes_per_row), buffer.writer,
      [ranges(buffer.readers.filter((reader) => reader !== "result")), buffer.readers.includes("result") ? "result" : ""].filter(Boolean).join(", "),
      buffer.storage, buffer.dead_rows])));
}

function drawBucketTable(box) {
  const steps = replaysByBucket();
  const captured = Boolean(measured()?.captures.length);
  const ofCapture = ({ seconds, pool_bytes, graph_bytes }) => [`${seconds.toFixed(2)} s`, size(pool_bytes), size(graph_bytes)];
  box.replaceChildren(table(
    [number("rows on a rank"), number("padding at most"), number("share"), number("buffers"), number("sent by a rank"), number("steps of the history"),
      ...(captured ? [number("captured in"), number("pool grew by"), number("graphs take")] : [])],
    facts().buckets.map((bucket) => [bucket.rows.toLocaleString("en"), bucket.most_padding_rows, percent(bucket.most_padding_rows / bucket.rows),
      size(bucket.buffer_bytes), size(bucket.collective_bytes_sent_per_rank), steps.size ? steps.get(bucket.rows) ?? 0 : "-",
      ...(captured ? ofCapture(captureOf(bucket)) : [])])));
}

/** Fill the table of a disclosure when it is open: long tables cost nothing until somebody looks. */
function refresh(id, draw) {
  const details = byId(id);
  if (details.open) draw(details.querySelector(".table"));
}

// ---- passes ----

function drawPasses() {
  const differences = FACTS.differences[state.program] ?? {};
  const times = FACTS.timings[state.program] ?? {};
  byId("pass-list").replaceChildren(...facts().passes.map((entry) => {
    const quiet = entry.difference === "nothing" || entry.difference === "-";
    const seconds = times[`pass ${entry.name}`];
    const cells = [
      element("span", {}, `${entry.number}. ${entry.name}`),
      element("span", { class: "quiet" }, counted(entry.nodes, "node")),
      element("span", { class: quiet ? "quiet" : "" }, entry.difference === "-" ? "the graph as captured" : entry.difference),
      element("span", { class: "quiet" }, entry.notes.join("; ")),
      element("span", { class: "number" }, seconds === undefined ? "" : `${(1000 * seconds).toFixed(0)} ms`),
    ];
    if (!(entry.name in differences)) return element("div", { class: "pass" }, element("div", { class: "head" }, ...cells));
    const lines = element("pre", { tabindex: "0" });
    const details = element("details", { class: "pass", "data-pass": entry.name }, element("summary", {}, ...cells), lines);
    details.addEventListener("toggle", () => details.open && drawDifference(lines, differences[entry.name]));
    return details;
  }));
}

/** Layers that a part of a difference names: L3.attend, layers.3.attn, "layers 0-1, 3". */
function layersOfText(part) {
  const names = [...part.matchAll(/\b(?:L|layers\.)(\d+)\./g)].map((match) => Number(match[1]));
  const spans = [...part.matchAll(/\blayers? ([\d, -]+)/g)].flatMap((match) => match[1].split(",")).filter((span) => span.trim());
  return names.concat(spans.flatMap((span) => {
    const [low, high] = span.split("-").map(Number);
    return Array.from({ length: (high ?? low) - low + 1 }, (_, step) => low + step);
  }));
}

/** Lines of a difference; while a search is on, the hunks and groups that it finds, whole. */
function drawDifference(box, difference) {
  const parts = difference.trimEnd().split(/\n(?=@@|\s+\d+ x |text:|\n)/);
  const shown = parts.filter((part) => !search.on || (hasWords(part) && inLayers(layersOfText(part))));
  const kind = (line) => (/^\s*\+/.test(line) ? "plus" : /^\s*-/.test(line) ? "less" : line.startsWith("@@") ? "at" : "");
  const lines = shown.flatMap((part) => part.split("\n"));
  box.replaceChildren(...lines.flatMap((line) => [element("span", { class: kind(line) }, marked(line)), "\n"]));
  if (lines.length === 0) box.append("Nothing in this difference matches the search.");
}

// ---- history ----

function drawReplays() {
  const box = byId("replays");
  if (FACTS.replays.length === 0) {
    box.replaceChildren(element("p", { class: "lead" }, "No step has run on this dump. An engine that is started with --dump-dir " +
      "writes a line for each of its steps, and shows the last of them here when it is closed."));
    return;
  }
  const groups = new Map();
  for (const step of FACTS.replays) {
    const how = step.bucket === null ? `not replayed: ${step.not_replayed}` : `bucket ${step.bucket}`;
    groups.set(how, [...(groups.get(how) ?? []), step]);
  }
  const middle = (values) => values.sort((a, b) => a - b)[Math.floor(values.length / 2)];
  const replayed = FACTS.replays.filter((step) => step.bucket !== null).length;
  const rows = [...groups].sort(([, [a]], [, [b]]) => (a.bucket ?? Infinity) - (b.bucket ?? Infinity)).map(([how, steps]) => [
    how, steps.length, percent(steps.length / FACTS.replays.length), ranges(steps.map((step) => step.rows)),
    `${(middle(steps.map((step) => step.microseconds)) / 1000).toFixed(2)} ms`,
  ]);
  box.replaceChildren(element("p", { class: "lead" }, `${counted(replayed, "step")} of the last ${FACTS.replays.length.toLocaleString("en")} ` +
    "were replayed. Each stands twice: by its rows, and by the time that prelude and body took together."),
    element("div", { class: "legend" }, swatch("plain", "replayed"), swatch("bad", "not replayed")));
  drawHistory(box);
  box.append(element("div", { class: "table", tabindex: "0" }, table(
    [text("how"), number("steps"), number("share"), text("rows"), number("median of the time")], rows)));
}

// ---- programs, search, keys ----

function makeTabs() {
  const tab = (program) => element("button", {
    role: "tab", type: "button", id: `tab-${program}`, "aria-controls": "program", onclick: () => open(program),
  }, program);
  byId("programs").replaceChildren(...Object.keys(FACTS.programs).map(tab));
}

function open(program) {
  state.program = program;
  state.pinned = null;
  for (const tab of byId("programs").children) {
    const chosen = tab.id === `tab-${program}`;
    tab.setAttribute("aria-selected", chosen);
    tab.setAttribute("tabindex", chosen ? "0" : "-1");
  }
  byId("program").setAttribute("aria-labelledby", `tab-${program}`);
  drawAll();
  remember();
}

function find(query) {
  state.query = query;
  byId("find").value = query;
  search = parsed(query);
  drawMatches();
  remember();
}

/** Program and search stand in the address, so that a view can be passed on. */
function remember() {
  const parts = new URLSearchParams({ program: state.program, ...(state.query ? { find: state.query } : {}) });
  history.replaceState(null, "", `#${parts}`);
}

const matches = () => (search.on ? facts().pieces.filter(matchesPiece) : []);

function drawMatches() {
  const found = matches();
  const numbers = new Set(found.map((piece) => String(piece.number)));
  const layerHit = (layer) => layer === "" || inLayers([Number(layer)]);
  for (const item of document.querySelectorAll("#layers .item"))
    item.classList.toggle("dim", search.on && !(numbers.has(item.dataset.piece) && layerHit(item.dataset.layer)));
  for (const row of document.querySelectorAll("#layers .row"))
    row.classList.toggle("match", search.layers.length > 0 && row.dataset.layer !== "" && layerHit(row.dataset.layer));
  drawLifelines(byId("lifelines"), pin);
  moveCursor(state.pinned === null ? null : state.pinned.number);
  drawLegends();
  drawKinds();
  drawRegions();
  drawCollectives();
  refresh("buffer-table", drawBufferTable);
  for (const details of document.querySelectorAll(".pass[open]"))
    drawDifference(details.querySelector("pre"), FACTS.differences[state.program][details.dataset.pass]);
  const buffers = facts().buffers.filter(matchesBuffer).length;
  byId("found").textContent = search.on ? `${counted(found.length, "instruction")}, ${counted(buffers, "buffer")} and ` +
    `${counted(facts().collectives.filter(matchesMove).length, "collective")} match` : "";
}

/** Go to the next match in the picture, or the one before. */
function jump(step) {
  const items = [...document.querySelectorAll("#layers .item:not(.dim)")];
  if (!search.on || items.length === 0) return;
  const here = items.findIndex((item) => state.pinned !== null && item.dataset.piece === String(state.pinned.number));
  const item = items[(here + step + items.length + (here < 0 && step < 0 ? 1 : 0)) % items.length];
  state.pinned = null;
  pin(facts().pieces.find((piece) => String(piece.number) === item.dataset.piece));
  item.scrollIntoView({ block: "nearest", inline: "nearest" });
}

function drawAll() {
  drawSummary();
  drawLayers(byId("layers"), (piece) => state.pinned === null && showDetail(piece), pin);
  showDetail(state.pinned);
  drawBuckets(byId("bucket-chart"));
  refresh("bucket-table", drawBucketTable);
  drawPasses();
  drawReplays();
  drawMatches();
}

function start() {
  const asked = new URLSearchParams(location.hash.slice(1));
  if (asked.get("program") in FACTS.programs) state.program = asked.get("program");
  else if ("body" in FACTS.programs) state.program = "body";
  else if ("body-sharded" in FACTS.programs) state.program = "body-sharded";
  state.query = asked.get("find") ?? "";
  search = parsed(state.query);
  byId("find").value = state.query;
  makeTabs();
  open(state.program);
  byId("find").addEventListener("input", (event) => find(event.target.value));
  byId("search").addEventListener("submit", (event) => event.preventDefault());
  byId("find").addEventListener("keydown", (event) => {
    if (event.key === "Enter") jump(event.shiftKey ? -1 : 1);
  });
  byId("next").addEventListener("click", () => jump(1));
  byId("previous").addEventListener("click", () => jump(-1));
  byId("programs").addEventListener("keydown", (event) => {
    const names = Object.keys(FACTS.programs);
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step === undefined) return;
    open(names[(names.indexOf(state.program) + step + names.length) % names.length]);
    byId(`tab-${state.program}`).focus();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      tip(null);
      if (state.pinned !== null) pin(state.pinned);
      else if (state.query) find("");
      showDetail(null);
    } else if (event.key === "/" && document.activeElement !== byId("find")) {
      event.preventDefault();
      byId("find").select();
    }
  });
  for (const [id, draw] of [["buffer-table", drawBufferTable], ["bucket-table", drawBucketTable]])
    byId(id).addEventListener("toggle", () => refresh(id, draw));
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    drawAll();
  });
}

start();
