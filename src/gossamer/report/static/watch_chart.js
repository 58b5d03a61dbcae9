// Line charts over the time of the run. The page's main script is before this one.

function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((s) => s * power).find((s) => s >= rough);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k += 1) found.push(Number((k * step).toPrecision(12)));
  return found;
}

function decades(low, high) {
  const found = [];
  for (let p = Math.floor(Math.log10(low)); 10 ** p <= high * 1.001; p += 1) {
    for (const m of high / low > 100 ? [1] : [1, 2, 5]) if (m * 10 ** p >= low * 0.999 && m * 10 ** p <= high * 1.001) found.push(m * 10 ** p);
  }
  const skip = Math.ceil(found.length / 6);
  return found.filter((_, k) => k % skip === 0);
}

// Lines of [x, y] points over time. Values over a wide range get a logarithmic axis if `log` allows it.
function chart(id, series, { log = false, zero = false, format = digits }) {
  const svg = $(id), width = svg.clientWidth || 400, height = svg.clientHeight || 230;
  const points = series.flatMap((s) => s.points), ys = points.map((p) => p[1]);
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  if (!points.length) return { mark() {} };
  const end = Math.max(rest.seconds || 0, 0.1), positive = ys.filter((y) => y > 0);
  const wide = log && positive.length && Math.max(...ys) > 8 * Math.min(...positive);
  let low = wide ? Math.min(...positive) : zero ? 0 : Math.min(...ys), high = Math.max(...ys);
  if (wide) { low *= 0.85; high *= 1.15; } else if (high > low) high += 0.06 * (high - low); else if (high === low) { high += Math.abs(high) * 0.1 || 1; if (!zero) low -= Math.abs(low) * 0.1; }
  const marks = wide ? decades(low, high) : ticks(low, high, 5);
  const left = 12 + 7 * Math.max(...marks.map((m) => format(m).length)), bottom = height - 34, top = 10, right = width - 12;
  const x = (t) => left + (t / end) * (right - left);
  const level = wide ? (y) => Math.log(Math.max(y, low) / low) / Math.log(high / low) : (y) => (y - low) / (high - low);
  const y = (v) => bottom - level(v) * (bottom - top);
  for (const m of marks) {
    element(svg, "line", { class: "grid", x1: left, x2: right, y1: y(m), y2: y(m) });
    element(svg, "text", { x: left - 5, y: y(m) + 4, "text-anchor": "end" }, format(m));
  }
  const scale = end >= 7200 ? [3600, "h"] : end >= 180 ? [60, "min"] : [1, "s"];
  for (const t of ticks(0, end / scale[0], width < 360 ? 3 : 5)) element(svg, "text", { x: x(t * scale[0]), y: bottom + 15, "text-anchor": "middle" }, digits(t));
  element(svg, "text", { x: (left + right) / 2, y: height - 3, "text-anchor": "middle" }, `time (${scale[1]})`);
  if (wide) element(svg, "text", { x: right, y: top + 3, "text-anchor": "end" }, "logarithmic");
  element(svg, "line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom });
  for (const s of series) {
    const d = s.points.map(([t, v], k) => `${k && !(s.breaks || []).includes(k) ? "L" : "M"}${x(t).toFixed(1)},${y(v).toFixed(1)}`).join("");
    element(svg, "path", { class: s.kind || "", d });
    if (s.dots) for (const [t, v] of s.points) element(element(svg, "circle", { cx: x(t), cy: y(v), r: 3.5 }), "title", {}, `${s.dots}: ${digits(v, 4)} at ${duration(t)}`);
  }
  const now = element(svg, "line", { class: "now", y1: top, y2: bottom });
  svg.onclick = (event) => {
    const t = ((event.clientX - svg.getBoundingClientRect().left) * (width / svg.getBoundingClientRect().width) - left) / (right - left) * end;
    go(frames.findLastIndex((f) => f.time <= t));
  };
  return { mark(t) { now.setAttribute("x1", x(t)); now.setAttribute("x2", x(t)); } };
}
