"use strict";
// Everything a corpus or a model wrote goes into text nodes, never into markup.
const byId = (id) => document.getElementById(id);
const data = JSON.parse(byId("episode").textContent);
const svg = byId("drawing");
const all = (selector) => [...svg.querySelectorAll(selector)];
const bars = all("[data-segment]");
const lent = all("[data-lent]");
const gaps = all("[data-gap]");
const edges = all("[data-edge]");
const mounts = all("[data-mount]");
const lanes = [...document.querySelectorAll("#names [data-thread]")];
const [panel, view, axis, zoom, tip] = ["panel", "view", "axis", "zoom", "tip"].map(byId);
const hint = [...panel.children];
const threads = new Map(data.threads.map((thread) => [thread.id, thread]));
const own = new Map();
data.segments.forEach((segment, id) => own.set(segment.thread, [...(own.get(segment.thread) || []), id]));
const MOST_PIECES = 4000;
const MOST_CHARS = 200000;
const EDGE = 24;
let chosen = null;
let hits = [];

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

function tickStep(longest, width) {
  const rough = (longest * 110) / width;
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find((times) => power * times >= rough);
}

function drawTicks(longest, width, across) {
  const step = tickStep(longest, width);
  const grid = byId("grid");
  const ruler = byId("ruler");
  const put = (parent, tag, set, text) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(set)) node.setAttribute(name, value);
    if (text !== undefined) node.textContent = text;
    parent.append(node);
  };
  grid.replaceChildren();
  ruler.replaceChildren();
  ruler.setAttribute("width", width + EDGE);
  for (let at = 0; at <= longest; at += step) {
    const x = across(at);
    const label = axis.value === "time" ? `${Number(at.toPrecision(6))} s` : Math.round(at).toLocaleString("en");
    put(grid, "line", { class: "tick", x1: x, x2: x, y1: 0, y2: "100%" });
    put(ruler, "line", { class: "tick", x1: x, x2: x, y1: 18, y2: 26 });
    put(ruler, "text", { x: x + 3, y: 16 }, label);
  }
}

function draw() {
  const places = spans();
  const longest = places.reduce((most, place) => Math.max(most, place[1]), 0) || 1;
  const fits = Math.max(view.clientWidth - byId("names").offsetWidth - EDGE, 300);
  const width = fits * 2 ** Number(zoom.value);
  const across = (value) => (value / longest) * width;
  svg.setAttribute("width", width + EDGE);
  drawTicks(longest, width, across);
  const place = (rect, id) => {
    const [lo, hi] = places[id];
    rect.setAttribute("x", across(lo));
    rect.setAttribute("width", Math.max(across(hi) - across(lo), 0.5));
  };
  for (const rect of bars) place(rect, Number(rect.dataset.segment));
  for (const rect of lent) place(rect, Number(rect.dataset.lent));
  for (const line of gaps) {
    line.setAttribute("x1", across(places[Number(line.dataset.from)][1]));
    line.setAttribute("x2", across(places[Number(line.dataset.gap)][0]));
  }
  for (const edge of edges) {
    const from = across(places[Number(edge.dataset.from)][1]);
    const to = across(places[Number(edge.dataset.edge)][0]);
    edge.setAttribute("d", `M${from} ${edge.dataset.y1} V${edge.dataset.y2} H${to}`);
  }
  for (const arc of mounts) {
    const { y1, y2 } = arc.dataset;
    const x1 = across(places[Number(arc.dataset.mount)][1]);
    const x2 = across(places[Number(arc.dataset.reader)][0]);
    const bend = x1 + EDGE + Math.abs(x2 - x1) / 3;
    arc.setAttribute("d", `M${x1} ${y1} C${bend} ${y1} ${x2} ${(Number(y1) + Number(y2)) / 2} ${x2} ${y2}`);
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

function link(id) {
  const segment = data.segments[id];
  const button = make("button", `${id}`);
  button.title = `thread ${segment.thread}, ${segment.kind}, ${segment.length} tokens`;
  button.addEventListener("click", () => go(id));
  return button;
}

function mark(id) {
  const seen = id === null ? new Set() : visible(id);
  svg.classList.toggle("dim", id !== null);
  bars.forEach((rect, at) => {
    rect.classList.toggle("chosen", at === id);
    rect.classList.toggle("seen", seen.has(at));
    rect.setAttribute("tabindex", at === (id ?? 0) ? 0 : -1);
  });
  const read = new Set(id === null ? [] : [id, ...seen].flatMap((at) => data.segments[at].mounts));
  for (const rect of lent) rect.classList.toggle("lit", read.has(Number(rect.dataset.lent)));
  for (const arc of mounts) {
    const [reader, source] = [Number(arc.dataset.reader), Number(arc.dataset.source)];
    const here = id !== null && data.segments[reader].mounts.includes(id);
    arc.classList.toggle("lit", reader === id || seen.has(reader) || (here && source === data.segments[id].thread));
  }
  const thread = id === null ? null : data.segments[id].thread;
  for (const lane of lanes) lane.classList.toggle("lit", Number(lane.dataset.thread) === thread);
}

function body(segment, fact) {
  const pre = make("pre");
  if (!segment.logps) {
    const text = textOf(segment);
    pre.textContent = text.length > MOST_CHARS ? `${text.slice(0, MOST_CHARS)} … ${text.length - MOST_CHARS} more characters` : text;
    return pre;
  }
  const mean = segment.logps.reduce((sum, logp) => sum + logp, 0) / segment.logps.length;
  const least = segment.logps.reduce((a, b) => Math.min(a, b), 0);
  fact("log-probs", `mean ${mean.toFixed(4)}, least ${least.toFixed(4)} (redder is less likely)`);
  segment.tokens.slice(0, MOST_PIECES).forEach((token, at) => {
    const piece = make("span", segment.pieces ? segment.pieces[at] : token + " ");
    piece.style.background = `rgba(224, 60, 30, ${Math.min(0.7, -segment.logps[at] / 6)})`;
    piece.dataset.tip = `token ${token}: log-prob ${segment.logps[at].toFixed(4)}, p ${Math.exp(segment.logps[at]).toFixed(4)}`;
    pre.append(piece);
  });
  const more = segment.tokens.length - MOST_PIECES;
  if (more > 0) pre.append(` … ${more} more tokens`);
  return pre;
}

function show(id) {
  const segment = data.segments[id];
  chosen = id;
  mark(id);
  const thread = threads.get(segment.thread);
  const facts = make("dl");
  const fact = (name, ...values) => {
    const cell = make("dd");
    cell.append(...values.map((value) => (value instanceof Node ? value : String(value))));
    facts.append(make("dt", name), cell);
  };
  fact("thread", `${thread.id}, ${thread.status}${thread.task ? ": " + thread.task : ""}`);
  fact("tokens", `${segment.length.toLocaleString("en")} at positions ${segment.start.toLocaleString("en")} to ${(segment.start + segment.length - 1).toLocaleString("en")}`);
  if (data.timed) fact("time", `${segment.time[0] ?? 0} to ${segment.time[1]} s`);
  if (segment.rewound) fact("rewound", "its thread went back to before it");
  if (segment.calls.length) fact(segment.kind === "tool" ? "result of" : "calls", segment.calls.join(", "));
  const sees = [...visible(id)].reduce((sum, at) => sum + data.segments[at].length, 0);
  fact("sees", `${sees.toLocaleString("en")} tokens before it`);
  if (segment.parent !== null) fact("continues", link(segment.parent));
  const sources = [...new Set(segment.mounts.map((m) => data.segments[m].thread))];
  for (const source of sources.sort((a, b) => a - b)) {
    const read = segment.mounts.filter((m) => data.segments[m].thread === source);
    const tokens = read.reduce((sum, m) => sum + data.segments[m].length, 0);
    fact(`reads ${source}`, `${tokens.toLocaleString("en")} tokens in ${read.length} segments, `, link(read[0]), " to ", link(read[read.length - 1]));
  }
  const by = (ids, how) => (ids.length ? [`${how} ${ids.join(", ")}`] : []);
  const shared = [...by(segment.heirs, "continued by threads"), ...by(segment.readers, "mounted by threads")];
  fact("KV pages", `${segment.pages.toLocaleString("en")}, ${shared.length ? "shared: " + shared.join("; ") : "shared with no thread"}`);
  const pre = body(segment, fact);
  const side = make("div");
  side.append(make("h2", `segment ${id}: ${segment.kind}`), facts);
  panel.replaceChildren(side, pre);
}

function go(id) {
  show(id);
  bars[id].focus({ preventScroll: true });
  bars[id].scrollIntoView({ block: "nearest", inline: "nearest" });
}

function clear() {
  chosen = null;
  mark(null);
  panel.replaceChildren(...hint);
}

function find(wanted) {
  const text = wanted.toLowerCase();
  hits = [];
  bars.forEach((rect, id) => {
    const hit = text !== "" && textOf(data.segments[id]).toLowerCase().includes(text);
    rect.classList.toggle("found", hit);
    if (hit) hits.push(id);
  });
  byId("hits").textContent = text === "" ? "" : `${hits.length} segments`;
}

function step(by) {
  const mine = own.get(data.segments[chosen].thread);
  const next = mine[mine.indexOf(chosen) + by];
  if (next !== undefined) go(next);
}

function beside(by) {
  const order = lanes.map((lane) => Number(lane.dataset.thread));
  const thread = order[order.indexOf(data.segments[chosen].thread) + by];
  if (thread === undefined) return;
  const here = spans()[chosen][0];
  const places = spans();
  go(own.get(thread).reduce((a, b) => (Math.abs(places[b][0] - here) < Math.abs(places[a][0] - here) ? b : a)));
}

function zoomTo(value, at) {
  const before = Number(svg.getAttribute("width")) - EDGE;
  const left = view.scrollLeft + at;
  zoom.value = value;
  draw();
  view.scrollLeft = (left / before) * (Number(svg.getAttribute("width")) - EDGE) - at;
}

function theme() {
  const dark = getComputedStyle(document.documentElement).colorScheme === "dark";
  document.documentElement.dataset.theme = dark ? "light" : "dark";
}

function tipOf(target) {
  const { tip: said, segment, source, reader } = target.dataset || {};
  if (said !== undefined) return said;
  if (reader !== undefined) {
    const read = data.segments[Number(reader)];
    const tokens = read.mounts.filter((m) => data.segments[m].thread === Number(source));
    const sum = tokens.reduce((total, m) => total + data.segments[m].length, 0);
    return `thread ${read.thread} reads ${sum.toLocaleString("en")} tokens of thread ${source}: mounted in place, none copied`;
  }
  if (segment === undefined) return null;
  const at = data.segments[Number(segment)];
  const head = `segment ${segment} · thread ${at.thread} · ${at.kind}${at.rewound ? ", rewound" : ""} · ${at.length.toLocaleString("en")} tokens at ${at.start.toLocaleString("en")}`;
  const calls = at.calls.length ? `\n${at.calls.join(", ")}` : "";
  const start = textOf(at).trim().slice(0, 160);
  return `${head}${calls}\n${start}${start.length === 160 ? "…" : ""}`;
}

document.addEventListener("pointermove", (event) => {
  const said = tipOf(event.target);
  tip.hidden = said === null;
  if (said === null) return;
  tip.textContent = said;
  tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${event.clientY + 18 + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 10 : event.clientY + 18}px`;
});
svg.addEventListener("click", (event) => {
  const { segment, reader } = event.target.dataset;
  if (segment !== undefined) show(Number(segment));
  else if (reader !== undefined) show(Number(reader));
  else clear();
});
byId("names").addEventListener("click", (event) => {
  const lane = event.target.closest("[data-thread]");
  if (lane) go(own.get(Number(lane.dataset.thread))[0]);
});
const keys = {
  ArrowRight: () => (chosen === null ? go(0) : step(1)),
  ArrowLeft: () => (chosen === null ? go(0) : step(-1)),
  ArrowDown: () => (chosen === null ? go(0) : beside(1)),
  ArrowUp: () => (chosen === null ? go(0) : beside(-1)),
  "/": () => byId("find").focus(),
  n: () => hits.length && go(hits.find((id) => id > (chosen ?? -1)) ?? hits[0]),
  "+": () => zoomTo(Number(zoom.value) + 0.5, view.clientWidth / 2),
  "-": () => zoomTo(Number(zoom.value) - 0.5, view.clientWidth / 2),
  t: () => {
    if (!data.timed) return;
    axis.value = axis.value === "time" ? "tokens" : "time";
    draw();
  },
  d: theme,
  Escape: clear,
};
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target instanceof HTMLInputElement || event.target instanceof HTMLSelectElement) {
    if (event.key === "Enter" && event.target.id === "find") keys.n();
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const act = keys[event.key];
  if (event.key === "Enter" && event.target.dataset.segment !== undefined) show(Number(event.target.dataset.segment));
  if (act === undefined) return;
  event.preventDefault();
  act();
});
view.addEventListener("wheel", (event) => {
  if (!event.ctrlKey) return;
  event.preventDefault();
  zoomTo(Number(zoom.value) - event.deltaY / 300, event.clientX - view.getBoundingClientRect().left - byId("names").offsetWidth);
}, { passive: false });
zoom.addEventListener("input", () => {
  const value = zoom.value;
  zoom.value = Math.log2((Number(svg.getAttribute("width")) - EDGE) / Math.max(view.clientWidth - byId("names").offsetWidth - EDGE, 300));
  zoomTo(value, view.clientWidth / 2);
});
axis.addEventListener("change", draw);
addEventListener("resize", draw);
byId("theme").addEventListener("click", theme);
byId("find").addEventListener("input", (event) => find(event.target.value));
if (!data.timed) axis.querySelector("[value=time]").disabled = true;
for (const title of svg.querySelectorAll("title")) title.remove(); // the tips say it, and more
// A link may say where to look: page.html#segment-30&axis=time&theme=dark
const asked = new URLSearchParams(location.hash.slice(1).replace("segment-", "segment="));
if (asked.has("theme")) document.documentElement.dataset.theme = asked.get("theme");
if (data.timed && asked.get("axis") === "time") axis.value = "time";
draw();
if (Number(asked.get("segment") ?? -1) in data.segments) show(Number(asked.get("segment")));
document.body.dataset.ready = String(bars.length);
