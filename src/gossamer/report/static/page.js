"use strict";
// Hover texts, zoom and stepping for the pictures of a page. Without this script the pictures are complete but still.
const SVG_NS = "http://www.w3.org/2000/svg";

function addTip(figure) {
  const tip = figure.appendChild(document.createElement("div"));
  tip.className = "tip";
  tip.hidden = true;
  figure.addEventListener("mouseleave", () => { tip.hidden = true; });
  return (event, text) => {
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    const frame = figure.getBoundingClientRect();
    const left = Math.min(event.clientX - frame.left + 14, frame.width - tip.offsetWidth - 4);
    tip.style.left = `${Math.max(0, left)}px`;
    tip.style.top = `${event.clientY - frame.top + 14}px`;
  };
}

// The position of the mouse in the coordinates of the SVG, which the boxes of the axes use as well.
function pointIn(svg, event) {
  return new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
}

function number(value) {
  return Math.abs(value) >= 1e4 ? value.toPrecision(6) : String(Number(value.toPrecision(4)));
}

// Line charts: the values of all lines at the point nearest to the mouse.
function lines(figure, svg, data) {
  const show = addTip(figure);
  const [left, top, right, bottom] = data.box;
  const rule = svg.appendChild(document.createElementNS(SVG_NS, "line"));
  for (const [name, value] of Object.entries({ y1: top, y2: bottom, stroke: "#8c959f", visibility: "hidden" })) {
    rule.setAttribute(name, value);
  }
  figure.addEventListener("mouseleave", () => rule.setAttribute("visibility", "hidden"));
  svg.addEventListener("mousemove", (event) => {
    const at = pointIn(svg, event);
    const inside = at.x >= left && at.x <= right && at.y >= top && at.y <= bottom;
    rule.setAttribute("visibility", inside ? "visible" : "hidden");
    if (!inside) return show(event, "");
    const x = data.x[0] + (at.x - left) / (right - left) * (data.x[1] - data.x[0]);
    const nearest = (points) => points.reduce((a, b) => (Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a));
    const rows = data.lines.filter((l) => l.points.length).map((l) => [l.label, ...nearest(l.points)]);
    if (!rows.length) return show(event, "");
    const place = left + (x - data.x[0]) / (data.x[1] - data.x[0]) * (right - left);
    rule.setAttribute("x1", place);
    rule.setAttribute("x2", place);
    const where = (px) => (data.unit === "step" ? `step ${number(px)}` : `${number(px)} ${data.unit}`);
    show(event, rows.map(([label, px, py]) => `${label}: ${number(py)} at ${where(px)}`).join("\n"));
  });
}

// Timelines: hover names the span; dragging zooms into a stretch of time, a double click shows the whole again.
function timeline(figure, svg, data) {
  const show = addTip(figure);
  const boxes = data.axes.map((a) => a.box);
  const [left, , right] = boxes[0];
  const whole = data.x;
  let [from, to] = whole;
  const bars = [...svg.querySelectorAll('[id^="spans-"] path')];
  for (const bar of bars) { // the clip must stay in place while the bar is stretched
    bar.parentNode.setAttribute("clip-path", bar.getAttribute("clip-path"));
    bar.removeAttribute("clip-path");
    bar.style.vectorEffect = "non-scaling-stroke";
  }
  const ticks = svg.appendChild(document.createElementNS(SVG_NS, "g"));
  const band = svg.appendChild(document.createElementNS(SVG_NS, "rect"));
  band.setAttribute("fill", "#0072b233");
  const timeAt = (x) => from + (Math.min(Math.max(x, left), right) - left) / (right - left) * (to - from);

  function redraw() {
    const zoom = (whole[1] - whole[0]) / (to - from);
    const shift = left - zoom * (left + (from - whole[0]) / (whole[1] - whole[0]) * (right - left));
    for (const bar of bars) bar.setAttribute("transform", `translate(${shift} 0) scale(${zoom} 1)`);
    ticks.replaceChildren();
    for (const tick of svg.querySelectorAll('[id^="xtick_"]')) tick.style.display = zoom === 1 ? "" : "none";
    if (zoom === 1) return;
    const rough = (to - from) / 8;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((s) => s * power).find((s) => s >= rough);
    for (let k = Math.ceil(from / step); k * step <= to; k += 1) {
      const text = ticks.appendChild(document.createElementNS(SVG_NS, "text"));
      text.textContent = String(Number((k * step).toPrecision(10)));
      text.setAttribute("x", left + (k * step - from) / (to - from) * (right - left));
      text.setAttribute("y", boxes.at(-1)[3] + 14);
      text.setAttribute("style", "font: 9px sans-serif; text-anchor: middle");
    }
  }

  let start = null;
  svg.addEventListener("mousedown", (event) => { start = pointIn(svg, event).x; event.preventDefault(); });
  svg.addEventListener("dblclick", () => { [from, to] = whole; redraw(); });
  window.addEventListener("mouseup", (event) => {
    if (start === null) return;
    const times = [timeAt(start), timeAt(pointIn(svg, event).x)].sort((a, b) => a - b);
    if (Math.abs(pointIn(svg, event).x - start) > 4 && times[1] > times[0]) { [from, to] = times; redraw(); }
    start = null;
    band.setAttribute("width", 0);
  });
  svg.addEventListener("wheel", (event) => { // a sideways wheel moves a zoomed timeline
    const move = Math.min(Math.max(event.deltaX / 500 * (to - from), whole[0] - from), whole[1] - to);
    if (!move) return;
    [from, to] = [from + move, to + move];
    event.preventDefault();
    redraw();
  }, { passive: false });
  svg.addEventListener("mousemove", (event) => {
    const at = pointIn(svg, event);
    if (start !== null) {
      const [a, b] = [start, at.x].sort((x, y) => x - y);
      const box = { x: a, width: b - a, y: boxes[0][1], height: boxes.at(-1)[3] - boxes[0][1] };
      for (const [name, value] of Object.entries(box)) band.setAttribute(name, value);
      return show(event, "");
    }
    const time = timeAt(at.x);
    for (const axis of data.axes) {
      const [, top, , bottom] = axis.box;
      if (at.y < top || at.y > bottom || at.x < left || at.x > right) continue;
      const row = axis.y[0] + (at.y - top) / (bottom - top) * (axis.y[1] - axis.y[0]);
      const hit = axis.spans.findLast(([worker, kind, begin, end]) => {
        const [low, high] = data.rows[kind === "exchange" ? "exchange" : "other"];
        return begin <= time && time <= end && worker + low <= row && row <= worker + high;
      });
      if (!hit) return show(event, "");
      const [worker, kind, begin, end, detail] = hit;
      return show(event, `worker ${worker}: ${kind}, ${number(end - begin)} ${data.unit}${detail}`);
    }
    return show(event, "");
  });
}

// Topologies: show all rounds or one, and mark the group of the worker under the mouse.
function rounds(grid) {
  const figures = [...grid.querySelectorAll("figure")];
  const bar = document.querySelector(".stepper");
  let shown = -1; // all
  function update() {
    grid.classList.toggle("one", shown >= 0);
    figures.forEach((figure, k) => figure.classList.toggle("shown", k === shown));
    bar.querySelector("span").textContent = shown < 0 ? "" : `round ${shown} of ${figures.length}`;
  }
  function step(by) {
    const from = shown < 0 ? (by > 0 ? -1 : 0) : shown;
    shown = by ? (from + by + figures.length) % figures.length : -1;
    update();
  }
  bar.hidden = figures.length < 2;
  for (const button of bar.querySelectorAll("button")) {
    button.addEventListener("click", () => step(Number(button.dataset.step)));
  }
  document.addEventListener("keydown", (event) => {
    if (event.key === "ArrowRight") step(1);
    if (event.key === "ArrowLeft") step(-1);
  });
  for (const figure of figures) {
    const workers = [...figure.querySelectorAll('[id="workers"] title')].map((title) => title.parentNode);
    const group = (worker) => worker.querySelector("title").textContent.split(": ")[1];
    for (const worker of workers) {
      worker.addEventListener("mouseenter", () => {
        if (!group(worker).startsWith("group")) return;
        for (const other of workers) other.classList.toggle("marked", group(other) === group(worker));
      });
      worker.addEventListener("mouseleave", () => workers.forEach((other) => other.classList.remove("marked")));
    }
  }
  update();
}

for (const figure of document.querySelectorAll("figure.live")) {
  const data = JSON.parse(figure.querySelector('script[type="application/json"]').textContent);
  ({ lines, timeline })[data.kind](figure, figure.querySelector("svg"), data);
}
for (const grid of document.querySelectorAll(".rounds")) rounds(grid);
