"use strict";
// The live page of a run. `run` holds what is fixed; `frames` the states of all workers, the first `onGrid` of them
// `every` seconds apart, then the newest.
const NS = "http://www.w3.org/2000/svg";
const POLL = 1000; // milliseconds between two looks
const SLOW = 1.3; // a worker is slow if its own time of a step is this many times the median
const $ = (id) => document.getElementById(id);
const token = new URLSearchParams(location.search).get("token");
let run = null, version = 0, every = 0, frames = [], onGrid = 0, plans = {}, rest = {}, at = -1, live = true, playing = 0;
let chosen = null, sortBy = "worker", charts = {}, drawnRound = "", lost = 0;

const of = (frame, name, worker) => (Array.isArray(frame[name]) ? frame[name][worker] : frame[name]);
const all = (frame, name) => Array.from({ length: run.workers }, (_, w) => of(frame, name, w));
const known = (values) => values.filter((v) => v !== null && v !== undefined);
const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);
const median = (values) => { const v = [...values].sort((a, b) => a - b); return v.length ? (v[(v.length - 1) >> 1] + v[v.length >> 1]) / 2 : null; };
const digits = (value, count = 3) => (value === 0 ? "0" : Math.abs(value) < 1e-3 ? value.toExponential(count - 1).replace(/\.?0*e/, "e") : String(Number(value.toPrecision(count))));
const percent = (value) => (value === null || value === undefined ? "–" : `${Math.round(100 * value)} %`);
const bytes = (v) => { const k = v >= 1e9 ? [1e9, "GB"] : v >= 1e6 ? [1e6, "MB"] : v >= 1e3 ? [1e3, "kB"] : [1, "B"]; return `${digits(v / k[0])} ${k[1]}`; };
const duration = (s) => (s < 90 ? `${digits(s, s < 10 ? 2 : 3)} s` : s < 5400 ? `${Math.floor(s / 60)} min ${Math.round(s % 60)} s` : `${digits(s / 3600)} h`);

function element(parent, name, attributes = {}, text = "") {
  const made = document.createElementNS(parent.namespaceURI === NS || name === "svg" ? NS : "http://www.w3.org/1999/xhtml", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== "") made.textContent = text;
  return parent.appendChild(made);
}

// -- data -------------------------------------------------------------------------------------------------------------

async function ask(path) {
  const answer = await fetch(path, { headers: token ? { Authorization: `Bearer ${token}` } : {}, cache: "no-store" });
  const content = await answer.json();
  if (!answer.ok) throw Object.assign(new Error(content.error || answer.statusText), { told: true });
  return content;
}

async function look() {
  try {
    const found = await ask(`api/frames?version=${version}&every=${every}&begin=${onGrid}`);
    if (found.version !== version) {
      run = await ask("api/run");
      [version, frames, plans, drawnRound] = [found.version, [], {}, ""];
      onGrid = 0;
      begin();
    }
    const before = frames.length ? frames[Math.max(0, at)].time : 0;
    frames = frames.slice(0, found.begin).concat(found.frames, found.newest ? [found.newest] : []);
    onGrid = found.begin + found.frames.length;
    const anew = found.begin === 0;
    every = found.every;
    Object.assign(plans, found.plans);
    rest = found;
    lost = 0;
    if (live || at < 0) at = frames.length - 1;
    else if (anew) at = Math.max(0, frames.findLastIndex((f) => f.time <= before + 1e-6));
    show();
  } catch (error) {
    lost += 1;
    $("dot").className = "lost";
    $("status-text").textContent = error.told ? error.message
      : "the server does not answer: the job has ended, or it is out of reach; gossamer watch DIR shows the run's folder";
  }
  const over = rest.status && rest.status.state !== "running";
  setTimeout(look, lost ? 3000 : over ? 5000 : POLL);
}

// -- everything at once -----------------------------------------------------------------------------------------------

function begin() {
  $("title").textContent = `${run.task}, ${run.method}, ${run.workers} ${run.virtual ? "virtual " : ""}workers`;
  document.title = `${$("title").textContent} – gossamer watch`;
  drawScene();
  drawTable();
}

function show() {
  const { status } = rest;
  $("dot").className = status.state;
  $("status-text").textContent = status.text;
  $("progress").max = status.steps;
  $("slider").max = Math.max(0, frames.length - 1);
  $("live").textContent = status.state === "running" ? "live" : "newest";
  $("notes").textContent = (rest.notes || []).join("; ");
  drawCharts();
  drawEvents();
  showFrame();
}

function showFrame() {
  const frame = frames[at];
  $("slider").value = at;
  $("live").classList.toggle("on", live);
  if (!frame) { $("what").textContent = "No step yet: the workers are starting."; return; }
  $("clock").textContent = duration(frame.time);
  const states = all(frame, "state"), own = all(frame, "own_ms"), steps = all(frame, "step");
  $("progress").value = Math.max(...steps);
  const usual = median(known(own));
  const slow = own.map((v, w) => states[w] === "training" && v !== null && run.workers > 1 && v > SLOW * usual && v > usual + 1);
  say(frame, states, steps, slow, own, usual);
  showTopology(frame, states, slow);
  showTable(frame, states, slow);
  showLinks(frame);
  for (const chart of Object.values(charts)) chart.mark(frame.time);
}

// The sentence on top, and what needs attention.
function say(frame, states, steps, slow, own, usual) {
  const step = Math.max(...steps), ms = median(known(all(frame, "step_ms"))), loss = mean(known(all(frame, "loss")));
  const waiting = mean(known(all(frame, "waiting")));
  const parts = [`Step ${step} of ${run.steps}`];
  if (ms !== null) parts.push(`${digits(ms)} ${run.simulated ? "simulated " : ""}ms a step`);
  if (waiting !== null) parts.push(`workers wait ${percent(waiting)} of the time`);
  if (loss !== null) parts.push(`training loss ${digits(loss, 4)}`);
  const ago = rest.status.state === "running" && ms !== null && step < run.steps && live ? duration((run.steps - step) * (run.simulated ? wallStep() : ms / 1e3)) : "";
  $("what").textContent = parts.join(", ") + (ago ? `; about ${ago} to go.` : ".");
  const list = [];
  slow.forEach((is, w) => is && list.push([`Worker ${w} is slow: ${digits(own[w])} ms of its own a step, the median is ${digits(usual)} ms.`, ""]));
  const gone = states.flatMap((s, w) => (s === "gone" ? [w] : []));
  if (gone.length) list.push([`Worker${gone.length > 1 ? "s" : ""} ${gone.join(", ")} died; the others continue.`, "bad"]);
  const silent = states.flatMap((s, w) => (s === "silent" ? [w] : []));
  if (silent.length === run.workers) list.push(["No worker takes steps: they evaluate, save, or wait for each other.", ""]);
  else if (silent.length) list.push([`Worker${silent.length > 1 ? "s" : ""} ${silent.slice(0, 12).join(", ")} took no step for a while.`, ""]);
  if (["failed", "dead"].includes(rest.status.state)) list.push([`The run ${rest.status.state === "dead" ? "is over: " : ""}${rest.status.text}.`, "bad"]);
  const shown = list.slice(0, 5);
  if (list.length > 5) shown.push([`… and ${list.length - 5} more.`, ""]);
  $("alerts").replaceChildren(...shown.map(([text, kind]) => { const li = document.createElement("li"); li.textContent = text; li.className = kind; return li; }));
}

const wallStep = () => { const f = frames[at], s = Math.max(...all(f, "step")); return s ? f.time / s : 0; };

// -- topology ---------------------------------------------------------------------------------------------------------

const toScene = (x, y) => [x, -y]; // y is upward in the scene

function drawScene() {
  const svg = $("topology"), { scene } = run, e = scene.extent;
  svg.replaceChildren();
  if (!run.drawn) { $("topology-see").textContent = `${run.workers} workers are too many for a picture.`; return; }
  const room = (way) => { const v = scene.boxes.map((b) => [b[way] - b[2], b[way] + b[2]]); return [Math.min(...v.map((p) => p[0])) - 0.7, Math.max(...v.map((p) => p[1])) + 0.7]; };
  const [[left, right], [low, high]] = [room(0), room(1)];
  svg.setAttribute("viewBox", `${left} ${-high} ${right - left} ${high - low}`);
  const nodes = element(svg, "g"), font = Math.min(0.5, e / 16);
  scene.boxes.forEach(([x, y, half], m) => {
    const [cx, cy] = toScene(x, y);
    element(nodes, "rect", { class: "box", x: cx - half, y: cy - half, width: 2 * half, height: 2 * half, rx: 0.3, "vector-effect": "non-scaling-stroke" });
    if (scene.boxes.length > 1) element(nodes, "text", { class: "node", x: cx, y: y > -1e-9 ? cy - half - 0.1 : cy + half + font, "font-size": font }, `node ${m}`);
  });
  element(svg, "g", { id: "round" });
  const dots = element(svg, "g", { id: "dots" });
  scene.workers.forEach(([x, y], w) => {
    const [cx, cy] = toScene(x, y), g = element(dots, "g", { "data-worker": w });
    const dot = element(g, "circle", { class: "w", cx, cy, r: 0.32, fill: "#fff" });
    element(dot, "title");
    element(g, "circle", { class: "ring", cx, cy, r: 0.38 });
    element(g, "path", { class: "cross", d: `M${cx - 0.25},${cy - 0.25}l.5,.5m-.5,0l.5,-.5`, "vector-effect": "non-scaling-stroke" });
    element(g, "text", { class: "w", x: cx, y: cy, "font-size": 0.3 }, String(w));
    dot.addEventListener("click", () => choose(w));
  });
}

function showTopology(frame, states, slow) {
  if (!run.drawn) return;
  const plan = plans[frame.plan] || { period: 0, rounds: [] };
  const dots = [...$("dots").children];
  const asynchronous = run.kind === "asynchronous";
  const k = plan.period && frame.round !== null ? frame.round % plan.period : null;
  const drawn = asynchronous ? `${frame.plan}|links|${at}` : `${frame.plan}|${k}`;
  if (drawn !== drawnRound) {
    drawnRound = drawn;
    const layer = $("round");
    layer.replaceChildren();
    if (asynchronous) drawTraffic(layer, plan, frame);
    else if (k !== null || run.kind === "all-reduce") drawRound(layer, plan.rounds[k || 0]);
    const colors = asynchronous ? null : plan.rounds[k || 0]?.colors;
    dots.forEach((g, w) => g.firstChild.setAttribute("fill", colors ? (colors[w] === "white" ? "#fff" : colors[w]) : "#fff"));
  }
  dots.forEach((g, w) => {
    const [dot, ring, cross] = g.children;
    ring.setAttribute("class", `ring ${w === chosen ? "chosen" : states[w] === "gone" ? "gone" : slow[w] ? "slow" : states[w] === "silent" ? "silent" : ""}`);
    cross.setAttribute("class", `cross ${states[w] === "gone" ? "gone" : ""}`);
    dot.firstChild.textContent = `worker ${w} on node ${run.node[w]}: ${states[w]}, step ${of(frame, "step", w)}`;
  });
  const gone = frame.plan ? ` among the ${frame.plan.split(",").length} workers that are there` : "";
  $("topology-see").textContent = asynchronous ? "Pairs average whenever both are free: the thicker an orange line, the more bytes in the last seconds."
    : run.kind === "all-reduce" ? "All workers average their gradients in every step."
    : k === null ? "The topology is drawn when the first round is known."
    : `Round ${frame.round}, the topology's round ${k} of 0 to ${plan.period - 1}${gone}: lines join workers that average now.`;
}

function drawLines(layer, lines, kind, width) {
  for (const [a, b] of lines) {
    const [[x1, y1], [x2, y2]] = [toScene(...a), toScene(...b)];
    element(layer, "line", { class: kind, x1, y1, x2, y2, "stroke-width": width });
  }
}

function drawRound(layer, panel) {
  if (!panel) return;
  for (const [points, tint] of panel.outlines) {
    const d = points.map((p) => toScene(...p).join(",")).join(" ");
    element(layer, "polygon", { points: d, fill: tint, stroke: tint, "stroke-width": 0.62, "stroke-linejoin": "round", opacity: 0.5 });
  }
  drawLines(layer, panel.intra, "intra", 2);
  drawLines(layer, panel.inter, "inter", 2);
  drawLines(layer, panel.bands, "band", 5);
  for (const [x, y] of panel.hubs) element(layer, "circle", { class: "hub", cx: x, cy: -y, r: 0.18 });
}

function drawTraffic(layer, plan, frame) {
  for (const panel of plan.rounds) drawLines(layer, [...panel.intra, ...panel.inter], "faint", 1);
  if (run.links_between !== "worker") return;
  const most = Math.max(1, ...frame.links.map((l) => l[2]));
  for (const [a, b, rate] of frame.links) {
    drawLines(layer, [[run.scene.workers[a], run.scene.workers[b]]], "traffic", 1 + (6 * rate) / most);
  }
}

function choose(worker) {
  chosen = chosen === worker ? null : worker;
  drawCharts();
  showFrame();
}

// -- workers ----------------------------------------------------------------------------------------------------------

const COLUMNS = [
  ["worker", "worker", (f, w) => w],
  ["state", "state", (f, w) => of(f, "state", w)],
  ["step", "step", (f, w) => of(f, "step", w)],
  ["own_ms", "ms a step", (f, w) => of(f, "own_ms", w) ?? of(f, "step_ms", w)],
  ["waiting", "waits", (f, w) => of(f, "waiting", w)],
  ["awaited", "awaited", (f, w) => of(f, "awaited", w)],
  ["sent", "sends/s", (f, w) => of(f, "sent", w)],
  ["loss", "loss", (f, w) => of(f, "loss", w)],
];

const HINTS = {
  own_ms: "own time of a step, without waiting where that is measured",
  waiting: "the share of its time that the worker waits for others",
  awaited: "how much of a worker's time all others together waited for this one",
};

function drawTable() {
  const row = document.createElement("tr");
  for (const [name, title] of COLUMNS) {
    const th = row.appendChild(document.createElement("th"));
    th.textContent = title;
    th.title = HINTS[name] || "";
    th.addEventListener("click", () => { sortBy = name; showFrame(); });
  }
  $("workers").tHead.replaceChildren(row);
  const body = $("workers").tBodies[0];
  body.replaceChildren();
  for (let w = 0; w < run.workers; w += 1) {
    const tr = body.appendChild(document.createElement("tr"));
    tr.dataset.worker = w;
    for (let c = 0; c < COLUMNS.length; c += 1) tr.appendChild(document.createElement("td"));
    for (const [c, kind] of [[3, "bar"], [4, "bar wait"]]) {
      tr.cells[c].append(document.createElement("span"), document.createElement("span"));
      tr.cells[c].lastChild.className = kind;
      tr.cells[c].lastChild.appendChild(document.createElement("i"));
    }
    tr.cells[1].appendChild(document.createElement("span")).className = "badge";
    tr.addEventListener("click", () => choose(w));
  }
}

function showTable(frame, states, slow) {
  const body = $("workers").tBodies[0], rows = [...body.rows].sort((a, b) => a.dataset.worker - b.dataset.worker);
  const values = rows.map((_, w) => COLUMNS.map(([, , get]) => get(frame, w)));
  const longest = Math.max(1e-9, ...values.map((v) => v[3] ?? 0));
  rows.forEach((tr, w) => {
    const v = values[w];
    const set = (cell, text) => { if (cell.textContent !== text) cell.textContent = text; };
    set(tr.cells[0], `${w} · node ${run.node[w]}`);
    const state = slow[w] ? "slow" : v[1];
    set(tr.cells[1].firstChild, state);
    tr.cells[1].firstChild.className = `badge ${state}`;
    set(tr.cells[2], String(v[2]));
    set(tr.cells[3].firstChild, v[3] === null ? "–" : digits(v[3]));
    tr.cells[3].lastChild.firstChild.style.width = `${(100 * (v[3] ?? 0)) / longest}%`;
    set(tr.cells[4].firstChild, percent(v[4]));
    tr.cells[4].lastChild.firstChild.style.width = `${100 * (v[4] ?? 0)}%`;
    set(tr.cells[5], percent(v[5]));
    set(tr.cells[6], v[6] === null ? "–" : bytes(v[6]));
    set(tr.cells[7], v[7] === null ? "–" : digits(v[7], 4));
    tr.classList.toggle("chosen", w === chosen);
  });
  const column = COLUMNS.findIndex(([name]) => name === sortBy);
  [...$("workers").tHead.rows[0].cells].forEach((th, c) => (c === column ? th.setAttribute("aria-sort", "descending") : th.removeAttribute("aria-sort")));
  const order = rows.map((_, w) => w);
  if (column === 1) order.sort((a, b) => slow[b] - slow[a] || (states[a] === "training") - (states[b] === "training") || a - b);
  else if (column > 1) order.sort((a, b) => (values[b][column] ?? -1) - (values[a][column] ?? -1) || a - b);
  if (order.some((w, place) => body.rows[place] !== rows[w])) body.append(...order.map((w) => rows[w]));
  const longestWaited = order.reduce((a, b) => ((values[b][5] ?? 0) > (values[a][5] ?? 0) ? b : a), 0);
  const most = values[longestWaited][5];
  $("workers-see").textContent = most > 0.02 && run.workers > 1
    ? `The others wait longest for worker ${longestWaited}: together ${percent(most)} of a worker's time.`
    : run.simulated ? "Times and waiting are predicted for the simulated cluster; losses are real. Click a row to follow a worker."
    : run.kind === "asynchronous" ? "Workers take steps at their own pace and wait for nobody. Click a row to follow a worker."
    : run.kind === "all-reduce" ? "DDP's waits are inside its backward pass and not measured. Click a row to follow a worker."
    : "No worker holds the others up. Click a row to follow a worker.";
}

// -- charts -----------------------------------------------------------------------------------------------------------

function line(name, worker = null) {
  const points = [];
  for (const f of frames) {
    const value = worker === null ? mean(known(all(f, name))) : of(f, name, worker);
    if (value !== null && value !== undefined) points.push([f.time, value]);
  }
  return points;
}

function eachWorker(name) {
  const varies = frames.some((f) => Array.isArray(f[name]));
  return varies ? Array.from({ length: run.workers }, (_, w) => ({ kind: "each", points: line(name, w) })) : [];
}

function drawCharts() {
  if (!run) return;
  const evaluated = (rest.evaluations || []).filter((e) => e.time !== null);
  const of_chosen = (name) => (chosen === null ? [] : [{ kind: "chosen", points: line(name, chosen) }]);
  const follows = chosen === null ? "" : ` Worker ${chosen} is the orange line.`;
  const losses = evaluated.filter((e) => e.loss !== null).map((e) => [e.time, e.loss]);
  const own = [{ points: line("loss") }];
  charts.loss = chart("loss", [...(run.workers <= 16 ? eachWorker("loss") : []), ...own, { kind: "evaluated", points: losses, dots: "validation loss of the averaged model" }, ...of_chosen("loss")], { log: true });
  const best = evaluated.at(-1);
  $("loss-see").textContent = best && best.loss !== null
    ? `Validation loss ${digits(best.loss, 4)}${run.metric !== "loss" && best.metric !== null ? `, ${run.metric} ${digits(best.metric, 4)}` : ""} of the averaged model at step ${best.step} (dots); the blue line is the mean training loss.${follows}`
    : `The blue line is the mean training loss; the first evaluation is still to come.${follows}`;
  const spread = evaluated.filter((e) => e.consensus_distance > 0).map((e) => [e.time, e.consensus_distance]);
  charts.distance = chart("distance", [{ kind: "evaluated", points: spread, dots: "consensus distance" }], { log: true });
  $("distance-see").textContent = spread.length ? `How far the workers' parameters are from their mean, at each evaluation: now ${digits(spread.at(-1)[1])}.`
    : run.kind === "all-reduce" ? "All workers hold the same parameters: the distance is 0."
    : run.kind === "elastic" ? "An elastic job does not measure it: that would take a second meeting of all workers."
    : "It is measured at evaluations (--eval-every); none has come yet.";
  const waits = line("waiting");
  charts.waiting = chart("waiting", [...eachWorker("waiting"), { points: waits }, ...of_chosen("waiting")], { zero: true, format: (v) => `${Math.round(100 * v)}%` });
  $("waiting-see").textContent = waits.length ? `The share of ${run.simulated ? "predicted " : ""}time that workers wait for others: mean (blue) and each worker (gray).${follows}`
    : "Not measured for this method; a timeline (--trace) shows it.";
}

// -- links and events -------------------------------------------------------------------------------------------------

function showLinks(frame) {
  const limit = run.link_bytes_per_second, byNode = new Map();
  for (const [a, b, rate] of frame.links) {
    const [from, to] = run.links_between === "worker" ? [run.node[a], run.node[b]] : [a, b];
    if (from !== to) byNode.set(from, (byNode.get(from) || 0) + rate);
  }
  const nodes = Math.max(...run.node) + 1;
  const uplinks = limit && nodes > 1 ? [...byNode].sort((a, b) => b[1] - a[1]).map(([m, rate]) => [`node ${m} → network`, rate, limit, ""]) : [];
  const word = run.links_between;
  const busiest = Math.max(1e-9, ...frame.links.map((l) => l[2]));
  const inside = ([a, b]) => (word === "worker" ? run.node[a] === run.node[b] : a === b);
  const pairs = frame.links.map((l) => [inside(l) && word === "node" ? `inside node ${l[0]}` : `${word} ${l[0]} → ${l[1]}`, l[2], inside(l) ? null : limit, inside(l) ? "inside" : ""]);
  const shown = [...uplinks.slice(0, 8), ...pairs].slice(0, 40);
  const table = document.createElement("table");
  for (const [label, rate, most, kind] of shown) {
    const tr = table.insertRow();
    tr.insertCell().textContent = label;
    tr.insertCell().textContent = `${bytes(rate)}/s${most ? `, ${percent(rate / most)}` : ""}`;
    const bar = tr.insertCell().appendChild(document.createElement("span"));
    bar.className = `bar ${kind}`;
    bar.appendChild(document.createElement("i")).style.width = `${Math.min(100, (100 * rate) / (most || busiest))}%`;
  }
  $("links").replaceChildren(table);
  const top = uplinks[0];
  $("links-see").textContent = run.kind === "all-reduce" ? "DDP's traffic is known by worker only: see the table of workers."
    : !shown.length ? "No bytes by link are known yet: they are noted once a second."
    : top ? `The busiest node sends ${bytes(top[1])}/s, ${percent(top[1] / limit)} of the ${bytes(limit)}/s of its ${run.simulated ? `simulated link, with the cluster's model of ${digits(run.model_mb)} MB` : "link"}.`
    : `The busiest link carries ${bytes(busiest)}/s; the bandwidth of the links is not known${nodes > 1 ? " (--link sets it)" : ""}.`;
}

const EVENT_TEXT = {
  started: () => "the job started", ended: () => "the job ended", failed: (e) => `the job failed: ${e.why}`,
  gone: (e) => `worker ${e.worker} died: ${e.why}`, replaced: (e) => `worker ${e.worker} is being replaced`,
};

function drawEvents() {
  const listed = [...(rest.events || [])];
  for (let w = 0; w < run.workers; w += 1) { // a worker that died has come back when it trains again
    for (let k = 1; k < frames.length; k += 1) {
      if (of(frames[k - 1], "state", w) === "gone" && of(frames[k], "state", w) === "training") listed.push({ time: frames[k].time, event: "back", worker: w, step: of(frames[k], "step", w) });
    }
  }
  listed.sort((a, b) => a.time - b.time);
  const text = (e) => (e.event === "back" ? `worker ${e.worker} is back, at step ${e.step}` : (EVENT_TEXT[e.event] || (() => e.event))(e));
  $("events").replaceChildren(...listed.map((e) => { const li = document.createElement("li"); li.textContent = `${duration(e.time)}: ${text(e)}`; return li; }));
}

// -- time -------------------------------------------------------------------------------------------------------------

function go(index) {
  at = Math.min(Math.max(0, index), frames.length - 1);
  live = at === frames.length - 1 && rest.status?.state === "running";
  showFrame();
}

function play() {
  clearInterval(playing);
  playing = playing ? 0 : 1;
  $("play").textContent = playing ? "⏸" : "▶";
  if (!playing) return;
  if (at >= frames.length - 1) go(0);
  playing = setInterval(() => { if (at >= frames.length - 1) return play(); return go(at + 1); }, Math.min(300, Math.max(60, 20000 / frames.length)));
}

$("play").addEventListener("click", play);
$("slider").addEventListener("input", () => go(Number($("slider").value)));
$("live").addEventListener("click", () => { go(frames.length - 1); live = true; showFrame(); });
window.addEventListener("resize", () => { if (run) { drawCharts(); showFrame(); } });
document.addEventListener("keydown", (event) => {
  if (["INPUT", "BUTTON"].includes(event.target.tagName)) return;
  if (event.key === " ") { event.preventDefault(); play(); }
  if (event.key === "ArrowRight") go(at + 1);
  if (event.key === "ArrowLeft") go(at - 1);
  if (event.key === "End") $("live").click();
});
