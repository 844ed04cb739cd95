
"use strict";
// Everything a corpus or a model wrote goes into text nodes, never into markup.
const data = JSON.parse(document.getElementById("episode").textContent);
const svg = document.getElementById("drawing");
const rects = [...svg.querySelectorAll("[data-segment]")];
const edges = [...svg.querySelectorAll("[data-edge]")];
const mounts = [...svg.querySelectorAll("[data-mount]")];
const panel = document.getElementById("panel");
const view = document.getElementById("view");
const axis = document.getElementById("axis");
const zoom = document.getElementById("zoom");
const MOST_PIECES = 4000;
let chosen = null;

function make(tag, text) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  return node;
}

function spans() {
  if (axis.value === "time") {
    return data.segments.map((s) => [s.time[0] || 0, Math.max(s.time[1], s.time[0] || 0)]);
  }
  return data.segments.map((s) => [s.start, s.start + s.length]);
}

function draw() {
  const places = spans();
  const longest = places.reduce((most, place) => Math.max(most, place[1]), 0) || 1;
  const width = data.width * 2 ** Number(zoom.value);
  const across = (value) => data.left + (value / longest) * width;
  svg.setAttribute("width", data.left + width + 20);
  for (const rect of rects) {
    const [lo, hi] = places[Number(rect.dataset.segment)];
    rect.setAttribute("x", across(lo));
    rect.setAttribute("width", Math.max(across(hi) - across(lo), 0.5));
  }
  for (const edge of edges) {
    const [, py, y] = edge.getAttribute("d").match(/^M[-\d.]+ ([-\d.]+) V([-\d.]+)/);
    const from = places[Number(edge.dataset.from)][1];
    const to = places[Number(edge.dataset.edge)][0];
    edge.setAttribute("d", `M${across(from)} ${py} V${y} H${across(to)}`);
  }
  for (const arc of mounts) {
    const [, y1, bend1, bend2, y2] = arc.getAttribute("d").match(
      /^M[-\d.]+ ([-\d.]+) C[-\d.]+ ([-\d.]+) [-\d.]+ ([-\d.]+) [-\d.]+ ([-\d.]+)/);
    const source = places[Number(arc.dataset.mount)];
    const x1 = across((source[0] + source[1]) / 2);
    const x2 = across(places[Number(arc.dataset.reader)][0]);
    arc.setAttribute("d", `M${x1} ${y1} C${x1} ${bend1} ${x2} ${bend2} ${x2} ${y2}`);
  }
}

function visible(id) {
  const seen = new Set();
  for (let at = id; at !== null; at = data.segments[at].parent) {
    if (at !== id) seen.add(at);
    for (const mount of data.segments[at].mounts) seen.add(mount);
  }
  return seen;
}

function textOf(segment) {
  return segment.text === null ? segment.tokens.join(" ") : segment.text;
}

function show(id) {
  const segment = data.segments[id];
  chosen = id;
  const seen = visible(id);
  for (const rect of rects) {
    const other = Number(rect.dataset.segment);
    rect.classList.toggle("chosen", other === id);
    rect.classList.toggle("seen", seen.has(other));
  }
  for (const arc of mounts) {
    arc.classList.toggle("lit",
      Number(arc.dataset.reader) === id || Number(arc.dataset.mount) === id);
  }
  const thread = data.threads.find((t) => t.id === segment.thread);
  const facts = make("dl");
  const fact = (name, value) => facts.append(make("dt", name), make("dd", String(value)));
  fact("thread", `${thread.id}, ${thread.status}${thread.task ? ": " + thread.task : ""}`);
  fact("tokens", `${segment.length} at positions ${segment.start} to ${segment.start + segment.length - 1}`);
  if (data.timed) fact("time", `${segment.time[0] ?? 0} to ${segment.time[1]} s`);
  if (segment.rewound) fact("rewound", "its thread went back to before it");
  if (segment.calls.length) fact(segment.kind === "tool" ? "result of" : "calls", segment.calls.join(", "));
  if (segment.mounts.length) {
    const tokens = segment.mounts.reduce((sum, m) => sum + data.segments[m].length, 0);
    fact("mounts", `${tokens} tokens of segments ${segment.mounts.join(", ")}`);
  }
  const by = (threads, how) => threads.length ? [`${how} ${threads.join(", ")}`] : [];
  const shared = [...by(segment.heirs, "continued by threads"), ...by(segment.readers, "mounted by threads")];
  fact("KV pages", `${segment.pages}, ${shared.length ? "shared: " + shared.join("; ") : "shared with no thread"}`);
  const body = make("pre");
  if (segment.logps) {
    const mean = segment.logps.reduce((sum, logp) => sum + logp, 0) / segment.logps.length;
    fact("log-probs", `mean ${mean.toFixed(4)}, least ${segment.logps.reduce((a, b) => Math.min(a, b), 0).toFixed(4)} (darker is less likely; hover a token)`);
    segment.tokens.slice(0, MOST_PIECES).forEach((token, at) => {
      const piece = make("span", segment.pieces ? segment.pieces[at] : token + " ");
      piece.style.background = `rgba(224, 60, 30, ${Math.min(0.7, -segment.logps[at] / 6)})`;
      piece.title = `${token}: ${segment.logps[at].toFixed(4)}`;
      body.append(piece);
    });
    if (segment.tokens.length > MOST_PIECES) body.append(` … ${segment.tokens.length - MOST_PIECES} more tokens`);
  } else {
    body.textContent = textOf(segment);
  }
  panel.replaceChildren(make("h2", `segment ${id}: ${segment.kind}`), facts, body);
}

function find(wanted) {
  const text = wanted.toLowerCase();
  let hits = 0;
  for (const rect of rects) {
    const hit = text !== "" && textOf(data.segments[Number(rect.dataset.segment)]).toLowerCase().includes(text);
    rect.classList.toggle("found", hit);
    hits += hit;
  }
  document.getElementById("hits").textContent = text === "" ? "" : `${hits} segments`;
}

function step(by) {
  const own = data.segments.map((_, id) => id).filter((id) => data.segments[id].thread === data.segments[chosen].thread);
  const next = own[own.indexOf(chosen) + by];
  if (next !== undefined) { show(next); rects[next].focus(); }
}

svg.addEventListener("click", (event) => {
  const { segment, reader } = event.target.dataset;
  if (segment !== undefined) show(Number(segment));
  else if (reader !== undefined) show(Number(reader));
});
svg.addEventListener("keydown", (event) => {
  const { segment } = event.target.dataset;
  if (event.key === "Enter" && segment !== undefined) show(Number(segment));
  if (event.key === "ArrowRight" && chosen !== null) { event.preventDefault(); step(1); }
  if (event.key === "ArrowLeft" && chosen !== null) { event.preventDefault(); step(-1); }
});
zoom.addEventListener("input", () => {
  const middle = (view.scrollLeft + view.clientWidth / 2) / svg.getAttribute("width");
  draw();
  view.scrollLeft = middle * svg.getAttribute("width") - view.clientWidth / 2;
});
axis.addEventListener("change", draw);
document.getElementById("find").addEventListener("input", (event) => find(event.target.value));
if (!data.timed) axis.querySelector("[value=time]").disabled = true;
const asked = /^#segment-(\d+)$/.exec(location.hash);
if (asked && Number(asked[1]) < data.segments.length) show(Number(asked[1]));
document.body.dataset.ready = String(rects.length);
