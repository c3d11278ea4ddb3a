// The samples: a slider over steps, rows of one prompt and seed, and the best and worst by each scorer.
"use strict";
const ROWS_AT_ONCE = 6; // a browser limits the number of videos of a page
const SECONDS_PER_STEP = 1.5; // while the slider plays
const SAMPLES = DATA.samples;
const shown = { first: 0, at: SAMPLES.steps.length - 1 };

// Each element has a URL of its own, which is unpacked only while it is in view.
function start(video) {
  video.src = URL.createObjectURL(unpacked(video.source));
}

function unpacked(source) {
  const [head, text] = source.split(",");
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return new Blob([bytes], { type: head.slice(5, head.indexOf(";")) });
}

function stop(video) {
  if (!video.src) return;
  URL.revokeObjectURL(video.src);
  video.removeAttribute("src");
  video.load?.();
}

// A video plays only while it is in view.
const playing = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (!isIntersecting) stop(target);
    else if (!target.src) start(target);
  }
}, { rootMargin: "150px" });

function forget(box) {
  for (const old of box.querySelectorAll("[data-video]")) { playing.unobserve(old); stop(old); }
  box.replaceChildren();
}

function video(figure, position) {
  const source = DATA.videos[position], still = source.startsWith("data:image"); // a video of one frame is an image
  const made = element(still ? "img" : "video", figure);
  made.dataset.video = position;
  made.source = source;
  if (still) made.addEventListener("load", () => made.classList.toggle("small", made.naturalWidth < 192));
  else {
    Object.assign(made, { muted: true, loop: true, autoplay: true, playsInline: true, controls: false });
    made.addEventListener("loadedmetadata", () => made.classList.toggle("small", made.videoWidth < 192));
    made.addEventListener("click", () => { if (made.paused) made.play(); else made.pause(); });
  }
  made.addEventListener("error", () => {
    const why = "This browser cannot decode the video, which is H.264.";
    if (made.src) made.replaceWith(element("div", null, why, "empty"));
  });
  playing.observe(made);
}

const digits = (value) => (value === null ? "–" : Number(value.toPrecision(4)).toString());

// Scores below a video, with their change since the first validation.
function caption(figure, title, card, before) {
  const text = element("figcaption", figure);
  element("b", text, title);
  for (const [name, value] of Object.entries(card.scores)) {
    const line = element("div", text, `${name} ${digits(value)} `);
    const old = before && before !== card ? before.scores[name] : null;
    if (old !== null && old !== undefined && value !== null) {
      const change = value - old;
      element("span", line, `${change >= 0 ? "+" : "−"}${digits(Math.abs(change))}`, change >= 0 ? "up" : "down");
    }
  }
  const checks = Object.entries(card.accuracy).filter(([name]) => name !== "all");
  if (checks.length) {
    const line = element("div", text);
    for (const [name, right] of checks) element("span", line, `${right ? "✓" : "✗"} ${name} `, right ? "right" : "wrong");
  }
  return text;
}

function figure(parent, title, card, before) {
  const made = element("figure", parent);
  if (!card) {
    element("div", made, "no video of this step", "empty");
    element("b", element("figcaption", made), title);
    return;
  }
  video(made, card.video);
  return caption(made, title, card, before);
}

const firstCard = (cards) => cards && cards[SAMPLES.steps.find((step) => cards[step] !== undefined)];

// The cards of one row, which the slider changes; a run without this step shows the one before.
function chosen(row) {
  const step = SAMPLES.steps[shown.at], found = [];
  DATA.runs.forEach((name, run) => {
    const cards = row.cards[run] || {}, before = firstCard(cards);
    if (DATA.runs.length === 1 && SAMPLES.steps.length > 1) found.push({ title: `step ${SAMPLES.steps[0]}`, card: cards[SAMPLES.steps[0]] });
    const at = SAMPLES.steps.slice(0, shown.at + 1).reverse().find((one) => cards[one] !== undefined) ?? step;
    found.push({ title: DATA.runs.length === 1 ? `step ${at}` : `${name}, step ${at}`, card: cards[at], before });
  });
  return found;
}

const rowsNow = () => SAMPLES.rows.slice(shown.first, shown.first + ROWS_AT_ONCE);

function showRows() {
  const box = document.getElementById("sample-rows");
  forget(box);
  const width = 30 + 204 * Math.max(2, DATA.runs.length);
  box.style.gridTemplateColumns = `repeat(auto-fill, minmax(min(100%, ${width}px), 1fr))`;
  for (const row of rowsNow()) {
    const made = element("div", box, undefined, "row"), prompt = element("p", made, `${row.prompt} `);
    prompt.dir = "auto";
    element("span", prompt, `sample ${row.sample}, seed ${row.seed}`);
    const columns = element("div", made, undefined, "columns");
    for (const { title, card, before } of chosen(row)) figure(columns, title, card, before);
  }
  count();
}

function count() {
  const last = Math.min(shown.first + ROWS_AT_ONCE, SAMPLES.rows.length);
  document.getElementById("step-shown").textContent = `step ${SAMPLES.steps[shown.at]}`;
  document.getElementById("rows-shown").textContent = `samples ${shown.first + 1} to ${last} of ${SAMPLES.rows.length}`;
  document.getElementById("pager").hidden = SAMPLES.rows.length <= ROWS_AT_ONCE;
}

const slider = document.getElementById("step-slider"), playButton = document.getElementById("play-steps");
slider.addEventListener("input", () => { shown.at = Number(slider.value); showRows(); });
const turn = (by) => {
  shown.first = Math.max(0, Math.min(shown.first + by, Math.floor((SAMPLES.rows.length - 1) / ROWS_AT_ONCE) * ROWS_AT_ONCE));
  showRows();
};
document.getElementById("rows-before").addEventListener("click", () => turn(-ROWS_AT_ONCE));
document.getElementById("rows-after").addEventListener("click", () => turn(ROWS_AT_ONCE));
let timer = null;
playButton.addEventListener("click", () => {
  playButton.textContent = timer === null ? "stop" : "play through training";
  if (timer !== null) { clearInterval(timer); timer = null; return; }
  timer = setInterval(() => {
    slider.value = shown.at = (shown.at + 1) % SAMPLES.steps.length;
    showRows();
  }, 1000 * SECONDS_PER_STEP);
});
if (SAMPLES.rows.length) showRows();

// The best and the worst samples, from the cards that the page was written with.
for (const box of document.querySelectorAll("#extremes .extremes")) {
  const found = JSON.parse(box.dataset.cards);
  for (const kind of ["best", "worst"]) {
    const part = element("div", box);
    element("h3", part, kind);
    const columns = element("div", part, undefined, "columns");
    for (const card of found[kind]) {
      const text = figure(columns, `sample ${card.sample}, seed ${card.seed}`, card);
      element("span", text, card.prompt, "prompt").dir = "auto";
    }
  }
}
