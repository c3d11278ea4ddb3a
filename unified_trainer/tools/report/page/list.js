// The list of runs: rows come again with new values, ticks stay, and ages are those of now.
"use strict";
const UNITS = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];

function ages() {
  for (const one of document.querySelectorAll("time")) {
    const seconds = Math.max(0, Date.now() / 1000 - Number(one.dataset.at));
    const [unit, size] = UNITS.find(([, length]) => seconds >= length) || UNITS[3];
    one.textContent = `${Math.floor(seconds / size)} ${unit} ago`;
  }
}

const ticked = () => [...document.querySelectorAll("#runs input:checked")].map((one) => one.value);
const button = document.getElementById("compare");
const allow = () => { button.disabled = ticked().length < 2; };
document.getElementById("runs").addEventListener("input", allow);
allow();
ages();

renewAlways((page) => {
  const before = new Set(ticked());
  document.getElementById("runs").replaceChildren(...page.getElementById("runs").childNodes);
  document.getElementById("counts").replaceChildren(...page.getElementById("counts").childNodes);
  for (const one of document.querySelectorAll("#runs input")) one.checked = before.has(one.value);
  allow();
  ages();
});
