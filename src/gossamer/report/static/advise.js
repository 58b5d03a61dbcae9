
// The sliders of an advice page. Every prediction is in the page; nothing is computed but the choice of the best.
(function advise() {
  const { what_if: grid, facts, colors } = JSON.parse(document.getElementById("data").textContent);
  const percent = (v) => `${Math.round(100 * v)} %`;
  const short = (v) => String(Number(v.toPrecision(3)));
  const make = (parent, name, attributes = {}, text = "") => {
    const made = document.createElementNS(parent.namespaceURI === SVG_NS || name === "svg" ? SVG_NS : "http://www.w3.org/1999/xhtml", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.textContent = text;
    return parent.appendChild(made);
  };

  function slider(parent, title, texts, start, changed) {
    const label = make(parent, "label");
    make(label, "span", {}, title);
    const shown = make(label, "b");
    const input = make(label, "input", { type: "range", min: 0, max: texts.length - 1, step: 1, "aria-label": title });
    input.value = start;
    input.disabled = texts.length < 2;
    const show = () => { shown.textContent = texts[input.value]; };
    input.addEventListener("input", () => { show(); changed(); });
    show();
    return () => Number(input.value);
  }

  for (const button of document.querySelectorAll("[data-copy]")) {
    button.addEventListener("click", async () => {
      const text = document.getElementById(button.dataset.copy);
      getSelection().selectAllChildren(text); // where the clipboard is not allowed, the lines are at least selected
      try { await navigator.clipboard.writeText(text.textContent); button.textContent = "copied"; } catch { button.textContent = "selected"; }
    });
  }

  // Links, nodes and jitter.
  const place = document.getElementById("what-if");
  place.replaceChildren();
  const sliders = make(place, "div", { class: "sliders" });
  const rate = (l) => (l.gbps === null ? `× ${short(l.factor)}` : `${short(l.gbps)} Gbit/s (× ${short(l.factor)})`);
  const link = slider(sliders, "link between nodes", grid.links.map(rate), grid.links.findIndex((l) => l.factor === 1), () => answer());
  const own = grid.nodes.findIndex((m) => m.workers === grid.own_workers);
  const nodes = slider(sliders, "nodes", grid.nodes.map((m) => `${m.nodes} (${m.workers} workers)`), own, () => answer());
  const jitter = slider(sliders, "jitter of compute times", grid.jitter.map((s) => (s === null ? "as described" : percent(s))), 0, () => answer());
  const said = make(place, "p", { class: "said", id: "said" });
  const scroll = make(place, "div", { class: "scroll" });
  const table = make(scroll, "table", { class: "ranking" });
  const paste = make(place, "div", { class: "paste" });
  const copy = make(paste, "button", { type: "button" }, "copy");
  const lines = make(paste, "pre", { id: "what-if-lines" });
  copy.addEventListener("click", async () => { getSelection().selectAllChildren(lines); try { await navigator.clipboard.writeText(lines.textContent); copy.textContent = "copied"; } catch { copy.textContent = "selected"; } });

  function answer() {
    const [ddp, ...rest] = grid.times[link()][nodes()][jitter()];
    const options = (o) => Object.entries(o).map(([k, v]) => `${k}=${v}`).join(", ");
    const rows = [{ method: "ddp (the best all-reduce)", color: colors.ddp, ms: 1e3 * ddp, factor: 1, settings: "", lines: grid.ddp_lines }];
    grid.rivals.forEach((r, k) => rows.push({ method: r.method, color: colors[r.method], ms: 1e3 * rest[k], factor: r.factor, settings: options(r.options), lines: r.lines }));
    for (const r of rows) r.score = r.ms * r.factor;
    const best = rows.slice(1).reduce((a, b) => (b.score < a.score ? b : a));
    const gain = 1 - best.score / rows[0].score, go = gain >= grid.worth;
    said.textContent = go ? `Gossip: ${best.method}${best.settings ? ` (${best.settings})` : ""} takes ${short(best.ms)} ms a step, all-reduce ${short(rows[0].ms)} ms; it reaches the same loss in ${percent(gain)} less time.`
      : `Keep DDP: the best gossip, ${best.method}, ${gain > 0 ? `gains ${percent(gain)}, less than the ${percent(grid.worth)} that are worth a change` : `is ${percent(-gain)} slower to the same loss`}.`;
    lines.textContent = (go ? best : rows[0]).lines.join("\n");
    copy.textContent = "copy";
    const longest = Math.max(...rows.map((r) => r.score));
    table.replaceChildren();
    const head = make(make(table, "thead"), "tr");
    for (const text of ["choice", "settings", "ms a step", "× steps", "score (ms)", ""]) make(head, "th", {}, text);
    const body = make(table, "tbody");
    for (const r of [...rows].sort((a, b) => a.score - b.score)) {
      const tr = make(body, "tr");
      for (const text of [r.method, r.settings, r.ms.toFixed(1), r.factor.toFixed(2), r.score.toFixed(1)]) make(tr, "td", {}, text);
      make(make(tr, "td", { class: "bar" }), "i", { style: `width:${(100 * r.score) / longest}%;background:${r.color}` });
    }
  }
  answer();

  // γ, ω and σ.
  const { form } = grid, where = document.getElementById("form");
  const nearest = (values, v) => values.reduce((best, x, k) => (Math.abs(x - v) < Math.abs(values[best] - v) ? k : best), 0);
  const bars = make(where, "div", { class: "sliders" });
  const gamma = slider(bars, "γ: all-reduce / compute", form.gamma.map(short), nearest(form.gamma, facts.gamma), () => map());
  const omega = slider(bars, "ω: exchange / all-reduce", form.omega.map(short), nearest(form.omega, facts.omega), () => map());
  const sigma = slider(bars, "σ: jitter", form.sigma.map(short), nearest(form.sigma, Math.sqrt(facts.sigma2 || 0)), () => map());
  const told = make(where, "p", { class: "said", id: "told" });
  const svg = make(where, "svg", { viewBox: "0 0 640 330", role: "img", "aria-label": "time saved over γ and ω" });

  function map() {
    const saving = form.saving[sigma()], [left, top, width, height] = [52, 12, 560, 262];
    const [w, h] = [width / form.gamma.length, height / form.omega.length];
    const x = (k) => left + k * w, y = (k) => top + height - (k + 1) * h;
    svg.replaceChildren();
    saving.forEach((row, o) => row.forEach((v, g) => {
      const strength = Math.max(-0.5, Math.min(0.8, v));
      const fill = strength >= 0 ? `rgba(31,127,192,${0.08 + 1.1 * strength})` : `rgba(213,94,0,${-1.2 * strength})`;
      const cell = make(svg, "rect", { x: x(g), y: y(o), width: w - 1, height: h - 1, fill });
      make(cell, "title", {}, `γ ${short(form.gamma[g])}, ω ${short(form.omega[o])}: ${v >= 0 ? `saves ${percent(v)}` : `loses ${percent(-v)}`}`);
    }));
    form.gamma.forEach((v, k) => k % 3 === 0 && make(svg, "text", { x: x(k) + w / 2, y: top + height + 16, "text-anchor": "middle" }, short(v)));
    form.omega.forEach((v, k) => k % 2 === 0 && make(svg, "text", { x: left - 6, y: y(k) + h / 2 + 4, "text-anchor": "end" }, short(v)));
    make(svg, "text", { x: left + width / 2, y: 312, "text-anchor": "middle" }, "γ: all-reduce / compute (logarithmic)");
    make(svg, "text", { x: 14, y: top + height / 2, "text-anchor": "middle", transform: `rotate(-90 14 ${top + height / 2})` }, "ω: exchange / all-reduce");
    const mine = [nearest(form.gamma, facts.gamma), nearest(form.omega, facts.omega)];
    make(svg, "circle", { cx: x(mine[0]) + w / 2, cy: y(mine[1]) + h / 2, r: 7, fill: "none", stroke: "var(--ink)", "stroke-width": 2 });
    make(svg, "rect", { x: x(gamma()), y: y(omega()), width: w - 1, height: h - 1, fill: "none", stroke: "var(--ink)", "stroke-width": 3 });
    const v = saving[omega()][gamma()];
    told.textContent = `${form.topology} on ${form.layout} ${v >= 0 ? "saves" : "loses"} ${percent(Math.abs(v))} of all-reduce's step time at γ ${short(form.gamma[gamma()])}, ω ${short(form.omega[omega()])}, σ ${short(form.sigma[sigma()])}.`;
  }
  map();
}());
