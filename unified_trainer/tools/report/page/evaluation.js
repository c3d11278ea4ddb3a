// The page of an evaluation: intervals of differences, and samples of one prompt and noise side by side.
"use strict";
const COLORS = ["#2463b0", "#e08e2b", "#2a9d74", "#a3559d", "#c0573f", "#58a7c9", "#7d8b99", "#c9b94a"];
const color = (i) => COLORS[i % COLORS.length];
const digits = (value) => Number(value.toPrecision(4)).toString();
const ROWS_AT_ONCE = 6; // a browser limits the number of videos of a page
const HEIGHT = 58, LINE = 26; // pixels of a chart without and for each checkpoint

for (const chart of DATA.charts) {
  const card = element("div", get("forest"), undefined, "chart forest");
  const title = element("h3", card, chart.measure);
  element("span", title, chart.better);
  const plot = element("div", card, undefined, "plot");
  const traces = chart.points.map((point) => ({
    x: [point.value], y: [DATA.runs[point.run]], mode: "markers", showlegend: false, name: DATA.runs[point.run],
    marker: { color: color(point.run), size: 9, symbol: point.kind ? "circle" : "circle-open" },
    error_x: { type: "data", symmetric: false, array: [point.high - point.value], arrayminus: [point.value - point.low], color: color(point.run), thickness: 2, width: 5 },
    hovertemplate: `${digits(point.value)} [${digits(point.low)}, ${digits(point.high)}]<extra></extra>`,
  }));
  const layout = {
    height: HEIGHT + LINE * traces.length, margin: { l: 8, r: 16, t: 6, b: 26 }, paper_bgcolor: "#fff", plot_bgcolor: "#fff", font: { size: 11 },
    xaxis: { zeroline: true, zerolinewidth: 2, zerolinecolor: "#8795a5", gridcolor: "#eef1f4", fixedrange: true, nticks: 6, rangemode: "tozero", tickformat: ".2~g" },
    yaxis: { automargin: true, fixedrange: true, autorange: "reversed", type: "category", range: [-0.5, traces.length - 0.5] },
  };
  Plotly.newPlot(plot, traces, layout, { displayModeBar: false, responsive: true });
}

const view = { first: 0, rows: DATA.rows };

function orderings() {
  const found = [["by prompt", DATA.rows]];
  const last = DATA.runs.length - 1;
  const names = DATA.rows.length && last ? Object.keys(DATA.rows[0].cards[0].scores) : [];
  for (const name of names) {
    const gain = (row) => row.cards[last].scores[name] - row.cards[0].scores[name];
    const falling = [...DATA.rows].sort((a, b) => gain(b) - gain(a));
    found.push([`${name}: largest gain of ${DATA.runs[last]}`, falling], [`${name}: largest loss of ${DATA.runs[last]}`, [...falling].reverse()]);
  }
  return found;
}

// Scores below a video, with their change against the first checkpoint.
function caption(parent, title, card, first) {
  const text = element("figcaption", parent);
  element("b", text, title);
  for (const [name, value] of Object.entries(card.scores)) {
    const line = element("div", text, `${name} ${digits(value)} `), change = value - first.scores[name];
    if (card !== first) element("span", line, `${change >= 0 ? "+" : "−"}${digits(Math.abs(change))}`, change >= 0 ? "up" : "down");
  }
  const checks = Object.entries(card.accuracy), line = element("div", text);
  for (const [name, right] of checks) element("span", line, `${right ? "✓" : "✗"} ${name} `, right ? "right" : "wrong");
}

function showRows() {
  const box = get("sample-rows"), width = 30 + 204 * Math.max(2, DATA.runs.length);
  box.replaceChildren();
  box.style.gridTemplateColumns = `repeat(auto-fill, minmax(min(100%, ${width}px), 1fr))`;
  const last = Math.min(view.first + ROWS_AT_ONCE, view.rows.length);
  for (const row of view.rows.slice(view.first, last)) {
    const made = element("div", box, undefined, "row"), prompt = element("p", made, `${row.prompt} `);
    prompt.dir = "auto";
    element("span", prompt, `seed ${row.seed}, sample ${row.sample}`);
    if (DATA.images[row.number]) Object.assign(element("img", made, undefined, "given"), { src: DATA.images[row.number], alt: "condition image" });
    const columns = element("div", made, undefined, "columns");
    const figures = row.cards.map(() => element("figure", columns));
    videos(row.cards.map((card, i) => ({ parent: figures[i], position: card.video })));
    row.cards.forEach((card, i) => caption(figures[i], DATA.runs[i], card, row.cards[0]));
  }
  get("rows-shown").textContent = `${view.first + 1} to ${last} of ${view.rows.length}`;
  get("pager").hidden = view.rows.length <= ROWS_AT_ONCE;
}

if (DATA.rows.length) {
  const order = get("order"), choices = orderings();
  choices.forEach(([words], i) => { element("option", order, words).value = i; });
  order.addEventListener("change", () => { Object.assign(view, { first: 0, rows: choices[order.value][1] }); showRows(); });
  const turn = (by) => {
    view.first = Math.max(0, Math.min(view.first + by, Math.floor((view.rows.length - 1) / ROWS_AT_ONCE) * ROWS_AT_ONCE));
    showRows();
  };
  get("rows-before").addEventListener("click", () => turn(-ROWS_AT_ONCE));
  get("rows-after").addEventListener("click", () => turn(ROWS_AT_ONCE));
  showRows();
}
