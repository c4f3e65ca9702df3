// Regions: what a compiler would be given; and, of a program that was started, how it was compiled and captured.

const sum = (values) => values.reduce((total, value) => total + value, 0);

/** Tiles of the summary that only a start has. */
function startTiles() {
  const start = measured();
  if (start === null) return [];
  const { regions, captures } = start;
  const graphs = sum(captures.map((capture) => capture.segments));
  const compiled = regions === null ? "operators run as they are" :
    `${counted(sum(regions.kinds.map((kind) => kind.count)), "region")} of ${counted(regions.kinds.length, "kind")} in ${regions.seconds.toFixed(1)} s`;
  const captured = graphs === 0 ? "a replay calls the pieces" :
    `${size(sum(captures.map((capture) => capture.graph_bytes)))}, captured in ${sum(captures.map((capture) => capture.seconds)).toFixed(1)} s`;
  return [["compile", regions === null ? "none" : "inductor", compiled], ["CUDA graphs", graphs.toLocaleString("en"), captured]];
}

function drawRegions() {
  const start = measured();
  const compiled = start?.regions ?? null;
  const words = element("p", { class: "lead" }, regionWords(start));
  byId("region-list").replaceChildren(words, ...(facts().regions.length ? [regionTable(compiled)] : []), ...(start ? featureTable(start.features) : []));
}

function regionWords(start) {
  const { regions, backends } = facts();
  if (regions.length === 0) {
    return Object.values(backends).every((backend) => backend === "reference") ?
      "None: all backends are reference, defined to the bit, which no compiler keeps." :
      "None: no operator here has a backend whose insides may be fused.";
  }
  const found = `${counted(sum(regions.map((region) => region.count)), "region")} of ${counted(regions.length, "kind")}`;
  if (start === null) return `${found}.`;
  if (start.regions === null) return `${found}, and nothing is compiled (--compile none): operators run as they are.`;
  const { kinds, seconds, casts_survive: kept } = start.regions;
  const cached = kinds.filter((kind) => kind.cached).length;
  return `${found}; ${counted(kinds.length, "kind")} compiled in ${seconds.toFixed(1)} s, ${cached} of them from Inductor's cache on disk. ` +
    `BF16 round trips inside a region are ${kept ? "kept: insides round where eager PyTorch rounds." :
      "dropped: insides keep more precision than eager PyTorch; results are rounded where they are stored."}`;
}

/** One line a kind; `compiled` has seconds by the text of the kind, or is null. */
function regionTable(compiled) {
  const byText = new Map(compiled?.kinds.map((kind) => [kind.text, kind]));
  const took = (kind) => (kind ? [kind.seconds.toFixed(2), kind.cached ? "yes" : "no"] : ["-", "-"]);
  return element("div", { class: "table", tabindex: "0" }, table(
    [name("kind"), name("operator and backend"), number("count"), text("layers"),
      ...(compiled ? [number("seconds"), text("cached")] : []), text("result, and all that makes the kind")],
    facts().regions.filter((region) => !search.on || matchesRegion(region)).map((region) => [
      region.of, region.name, region.count, ranges(region.layers) || "-",
      ...(compiled ? took(byText.get(region.text)) : []),
      element("details", {}, element("summary", {}, region.text.split("\n").at(-2).split(": ").at(-1)), element("pre", {}, region.text)),
    ])));
}

const featureTable = (features) => [
  element("h3", {}, "Features of torch"),
  element("p", { class: "lead" }, "What newer versions tell about CUDA graphs. Each is used where it is found, and nothing depends on it."),
  element("div", { class: "table", tabindex: "0" }, table(
    [name("feature"), text("in this torch"), text("with it")],
    features.map((feature) => [feature.name, feature.found ? "found" : "not there", feature.use]))),
];
