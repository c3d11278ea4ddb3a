// The page of a run that goes on: new values go into the charts, and the reader's place, slider and zoom stay.
"use strict";
const TABLES = ["overview", "rewards", "time", "settings", "environment", "next"];
const served = {}; // the text of each of them, as it came last

function renewTables(page) {
  for (const id of TABLES) {
    const fresh = page.getElementById(id);
    if (served[id] === fresh.innerHTML) continue;
    served[id] = fresh.innerHTML;
    const old = document.getElementById(id), open = [...old.querySelectorAll("details")].map((one) => one.open);
    fresh.querySelectorAll("details").forEach((one, i) => { if (i < open.length) one.open = open[i]; });
    old.replaceChildren(...fresh.childNodes);
  }
  paint();
}

const picture = () => JSON.stringify(rowsNow().map((row) => [row.prompt, chosen(row).map(
  ({ title, card }) => [title, card && { ...card, video: DATA.videos[card.video] }])]));

// The slider stays at its step; where it was at the last one, it follows.
function renewSamples(page, samples, videos) {
  const before = picture(), follows = shown.at >= SAMPLES.steps.length - 1, step = SAMPLES.steps[shown.at];
  SAMPLES = samples;
  DATA.videos = videos;
  const last = Math.max(samples.steps.length - 1, 0), at = samples.steps.indexOf(step);
  shown.at = follows || at < 0 ? last : at;
  slider.max = last;
  slider.value = shown.at;
  document.getElementById("step-ticks").replaceChildren(...page.getElementById("step-ticks").childNodes);
  document.getElementById("sample-part").hidden = !samples.rows.length;
  const none = document.getElementById("no-samples");
  if (none) none.hidden = samples.rows.length > 0;
  if (samples.rows.length && picture() !== before) showRows();
  else if (samples.rows.length) count();
  const text = page.getElementById("extremes").innerHTML;
  if (text !== rankedText) {
    forget(ranked);
    ranked.replaceChildren(...page.getElementById("extremes").childNodes);
    rankedText = text;
    fillRanked();
  }
}

renewAlways((page) => {
  const data = JSON.parse(page.getElementById("data").textContent);
  const place_of = [...document.querySelectorAll("main > section")].find((one) => one.getBoundingClientRect().bottom > 60);
  const top = place_of.getBoundingClientRect().top;
  DATA.runs = data.runs;
  renewTables(page);
  renewSamples(page, data.samples, data.videos);
  place(data.groups);
  redraw();
  if (window.scrollY > 0) window.scrollBy({ top: place_of.getBoundingClientRect().top - top, behavior: "instant" });
});
