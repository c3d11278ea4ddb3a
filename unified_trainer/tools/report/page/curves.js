// The curves: charts are drawn when they come into view, and share smoothing, scale, cursor and zoom.
"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const COLORS = ["#2463b0", "#e08e2b", "#2a9d74", "#a3559d", "#c0573f", "#58a7c9", "#7d8b99", "#c9b94a"];
const color = (i) => COLORS[i % COLORS.length];
const element = (tag, parent, text, kind) => {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  if (parent) parent.append(made);
  return made;
};
const finite = (values) => values.filter((value) => value !== null);

function paint() {
  document.querySelectorAll(".run .swatch").forEach((swatch, i) => { swatch.style.background = color(i); });
  document.querySelectorAll(".phases i").forEach((part) => { part.style.flexGrow = part.dataset.share; });
}
paint();

const options = { smoothing: 0.6, raw: true, log: false, ranges: true, zoom: null };
const charts = [];

// Exponential moving average, without the bias of its start.
function smoothed(values) {
  let mean = 0, weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = options.smoothing * mean + (1 - options.smoothing) * value;
    weight = options.smoothing * weight + (1 - options.smoothing);
    return mean / weight;
  });
}

function traces(chart) {
  const found = [];
  chart.traces.forEach((trace, i) => {
    const shade = color(DATA.runs.length > 1 ? trace.run : i);
    const name = DATA.runs.length > 1 ? DATA.runs[trace.run] : trace.label.split("/").pop();
    const common = { x: trace.steps, name, legendgroup: String(i), hoverlabel: { namelength: 40 } };
    if (chart.stacked && !options.log && DATA.runs.length === 1) {
      found.push({ ...common, y: smoothed(trace.values), mode: "lines", stackgroup: "sum", line: { color: shade, width: 0.5 } });
      return;
    }
    const few = trace.steps.length <= 30;
    const smooth = options.smoothing > 0 && trace.steps.length > 2;
    if (options.raw || !smooth) {
      found.push({ ...common, y: trace.values, mode: few ? "lines+markers" : "lines", opacity: smooth ? 0.35 : 1,
        line: { color: shade, width: smooth ? 1 : 1.6 }, marker: { size: 4 }, showlegend: !smooth, hoverinfo: smooth ? "skip" : "all" });
    }
    if (smooth) {
      found.push({ ...common, y: smoothed(trace.values), mode: "lines", line: { color: shade, width: 2 }, customdata: trace.values,
        hovertemplate: `%{y:.4~g} (raw %{customdata:.4~g})${chart.traces.length > 1 ? "" : "<extra></extra>"}` });
    }
    if (options.ranges && trace.departed.length) {
      const left = new Set(trace.departed);
      const at = trace.steps.map((step, k) => k).filter((k) => left.has(trace.steps[k]));
      found.push({ x: at.map((k) => trace.steps[k]), y: at.map((k) => trace.values[k]), mode: "markers", name: `${name}: out of range`,
        marker: { color: "#c0392b", size: 6, symbol: "circle-open", line: { width: 1.6 } }, showlegend: false, hoverinfo: "skip" });
    }
  });
  return found;
}

// The range of values that a chart shows: that of its points, with the nearest bound of a healthy range.
function extent(chart) {
  const values = chart.traces.flatMap((trace) => finite(trace.values)).filter((value) => !options.log || value > 0);
  if (!values.length) return null;
  let low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
  const size = Math.max(high - low, Math.abs(high) * 0.02, 1e-12);
  for (const trace of options.ranges ? chart.traces : []) {
    for (const bound of trace.band ? finite([trace.band.low, trace.band.high]) : []) {
      if (bound > low - 1.5 * size && bound < high + 1.5 * size && !(options.log && bound <= 0)) {
        low = Math.min(low, bound); high = Math.max(high, bound);
      }
    }
  }
  if (options.log) return [Math.log10(low) - 0.08, Math.log10(high) + 0.08];
  if (high === low) return high === 0 ? [-0.05, 1] : [high - Math.abs(high) / 2, high + Math.abs(high) / 2];
  const margin = Math.max(high - low, Math.abs(high) * 0.02) * 0.08;
  return [low - margin, high + margin];
}

function bandShapes(chart, range) {
  if (!options.ranges || !range) return [];
  const bottom = options.log ? 10 ** range[0] : range[0], top = options.log ? 10 ** range[1] : range[1];
  return chart.traces.filter((trace) => trace.band).map((trace) => {
    const low = Math.max(trace.band.low ?? bottom, bottom), high = Math.min(trace.band.high ?? top, top);
    if (high <= low) return null;
    return { type: "rect", xref: "paper", x0: 0, x1: 1, y0: low, y1: high, layer: "below", line: { width: 0 },
      fillcolor: "#2a9d74", opacity: DATA.runs.length > 1 ? 0.07 : 0.13 };
  }).filter(Boolean);
}

function draw(one) {
  const stacked = one.chart.stacked && !options.log && DATA.runs.length === 1;
  const range = stacked ? null : extent(one.chart);
  const many = one.chart.traces.length > 1;
  const layout = {
    margin: { l: 56, r: 12, t: 6, b: 30 }, hovermode: "x unified", showlegend: many, uirevision: "same",
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", font: { size: 10 } }, font: { size: 11, color: "#1d2733" },
    xaxis: { gridcolor: "#eef1f4", zeroline: false, showspikes: true, spikemode: "across", spikethickness: 1, spikedash: "solid",
      spikecolor: "#93a4b7", ...(options.zoom ? { range: options.zoom } : { autorange: true }) },
    yaxis: { gridcolor: "#eef1f4", zeroline: false, type: options.log ? "log" : "linear", fixedrange: true,
      exponentformat: "e", ...(range ? { range } : { autorange: true, rangemode: "tozero" }) },
    shapes: bandShapes(one.chart, range), paper_bgcolor: "#fff", plot_bgcolor: "#fff",
  };
  const first = !one.drawn;
  one.drawn = true;
  Plotly.react(one.plot, traces(one.chart), layout, { displayModeBar: false, responsive: true });
  if (first) link(one);
}

// The cursor and the zoom of one chart are those of all.
let following = false;
function link(one) {
  one.plot.on("plotly_hover", (event) => {
    if (following) return;
    following = true;
    for (const other of charts) {
      if (other !== one && other.seen) Plotly.Fx.hover(other.plot, { xval: event.xvals[0] }, "xy");
    }
    following = false;
  });
  one.plot.on("plotly_unhover", () => {
    for (const other of charts) if (other !== one && other.drawn) Plotly.Fx.unhover(other.plot);
  });
  one.plot.on("plotly_relayout", (event) => {
    const reset = event["xaxis.autorange"], from = event["xaxis.range[0]"];
    if (!reset && from === undefined) return;
    options.zoom = reset ? null : [from, event["xaxis.range[1]"]];
    for (const other of charts) {
      if (other === one || !other.drawn) continue;
      if (other.seen) draw(other); else other.stale = true;
    }
  });
}

const watch = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const one = charts[Number(entry.target.dataset.chart)];
    one.seen = entry.isIntersecting;
    if (one.seen && (!one.drawn || one.stale)) { one.stale = false; draw(one); }
  }
}, { rootMargin: "200px" });

function redraw() {
  for (const one of charts) if (one.seen) draw(one); else one.stale = true;
}

function title(one) {
  const traces = one.chart.traces, head = one.head;
  const bands = [...new Set(traces.filter((trace) => trace.band).map((trace) => trace.band.words))];
  const left = traces.reduce((sum, trace) => sum + trace.departed.length, 0);
  head.textContent = one.chart.title;
  if (bands.length === 1 || left) element("span", head, left ? `${left} outside` : `healthy: ${bands[0]}`, left ? "left" : "");
  head.title = bands.length ? `${one.chart.title}: healthy is ${bands.join("; ")}` : one.chart.title;
}

// Whether all values of a chart are equal, and none left its healthy range.
function isConstant(chart) {
  const values = chart.traces.flatMap((trace) => trace.values);
  return values.length > 1 && values[0] !== null && values.every((value) => value === values[0]) && chart.traces.every((trace) => !trace.departed.length);
}

// Makes a card for each chart; the constant ones are folded at the end of their group.
function place(groups) {
  for (const group of groups) {
    const details = element("details", document.getElementById("chart-groups"));
    Object.assign(details, { id: group.id, open: true });
    element("summary", details, group.title);
    const varying = element("div", details, undefined, "charts");
    const folded = element("details", details, undefined, "folded"), line = element("summary", folded);
    const constant = element("div", folded, undefined, "charts");
    for (const chart of group.charts) {
      chart.constant = isConstant(chart);
      const card = element("div", chart.constant ? constant : varying, undefined, "chart");
      const head = element("h3", card), plot = element("div", card, undefined, "plot");
      card.dataset.chart = charts.length;
      const one = { chart, card, head, details, plot, drawn: false, seen: false, stale: false };
      charts.push(one);
      watch.observe(card);
      title(one);
    }
    const alike = group.charts.filter((chart) => chart.constant);
    line.textContent = `${alike.length} constant: ${alike.map((chart) => `${chart.title} ${chart.traces[0].values[0]}`).join(", ")}`;
  }
  filterCharts();
}

function filterCharts() {
  const wanted = document.getElementById("filter").value.toLowerCase();
  const names = (chart) => [chart.title, ...chart.traces.map((trace) => trace.label)].join(" ").toLowerCase();
  for (const one of charts) one.card.hidden = !names(one.chart).includes(wanted);
  for (const details of new Set(charts.map((one) => one.details))) {
    const shown = charts.filter((one) => one.details === details && !one.card.hidden), folded = details.querySelector(".folded");
    details.hidden = !shown.length;
    folded.hidden = !shown.some((one) => one.chart.constant);
    if (wanted) folded.open = true; // the reader looks for one of them
  }
}

place(DATA.groups);
const control = (id, read) => document.getElementById(id).addEventListener("input", (event) => { read(event.target); redraw(); });
control("smoothing", (input) => { options.smoothing = Number(input.value); });
control("raw", (input) => { options.raw = input.checked; });
control("log", (input) => { options.log = input.checked; });
control("ranges", (input) => { options.ranges = input.checked; });
document.getElementById("filter").addEventListener("input", filterCharts);
