// Blind votes: two videos at a time, by keys or buttons, kept in the browser and saved as a file of votes.
"use strict";
const KEYS = { ArrowLeft: "left", ArrowRight: "right", ArrowDown: "tie" };
const STORED = `votes ${DATA.key}`;
const votes = { at: 0, voter: Math.random().toString(16).slice(2, 10), given: {} };

// A browser may refuse to store anything for a page that was opened from disk.
function restore() {
  try {
    Object.assign(votes, JSON.parse(localStorage.getItem(STORED) ?? "{}"));
  } catch (error) {
    get("note").textContent = `This browser does not keep votes (${error.message}): save them before you close the page.`;
  }
}

function keep() {
  try {
    localStorage.setItem(STORED, JSON.stringify(votes));
  } catch (error) {
    get("note").textContent = `This browser does not keep votes (${error.message}): save them before you close the page.`;
  }
}

function show() {
  const ballot = DATA.ballots[votes.at], box = get("pair"), given = votes.given[votes.at];
  box.replaceChildren();
  get("prompt").textContent = ballot.prompt;
  get("given").replaceChildren();
  if (DATA.images[ballot.number]) Object.assign(element("img", get("given")), { src: DATA.images[ballot.number], alt: "condition image" });
  const figures = ["left", "right"].map((side) => {
    const made = element("figure", box, undefined, given === side ? "chosen" : "");
    made.addEventListener("click", () => vote(side));
    return { parent: made, position: ballot[side] };
  });
  videos(figures);
  for (const kind of Object.values(KEYS)) get(kind).className = given === kind ? "chosen" : "";
  const done = Object.keys(votes.given).length;
  get("progress").value = done;
  get("count").textContent = `pair ${votes.at + 1} of ${DATA.ballots.length}, ${done} voted${done === DATA.ballots.length ? ": save the votes" : ""}`;
  get("back").disabled = votes.at === 0;
  get("next").disabled = votes.at === DATA.ballots.length - 1;
}

function move(by) {
  votes.at = Math.max(0, Math.min(votes.at + by, DATA.ballots.length - 1));
  keep();
  show();
}

function vote(kind) {
  votes.given[votes.at] = kind;
  move(1);
}

function table() {
  const voter = votes.voter.replaceAll(/[",\r\n]/g, " ");
  const rows = Object.entries(votes.given).map(([pair, kind]) => `${DATA.key},${voter},${pair},${kind}\n`);
  return `key,voter,pair,vote\n${rows.join("")}`;
}

function save() {
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([table()], { type: "text/csv" }));
  link.download = "votes.csv";
  link.click();
}

restore();
get("voter").value = votes.voter;
get("voter").addEventListener("input", (event) => { votes.voter = event.target.value; keep(); });
for (const kind of Object.values(KEYS)) get(kind).addEventListener("click", () => vote(kind));
get("back").addEventListener("click", () => move(-1));
get("next").addEventListener("click", () => move(1));
get("save").addEventListener("click", save);
document.addEventListener("keydown", (event) => {
  if (event.target === get("voter")) return;
  const step = { Backspace: -1, " ": 1 }[event.key];
  if (KEYS[event.key]) vote(KEYS[event.key]);
  else if (step) move(step);
  else return;
  event.preventDefault();
});
show();
