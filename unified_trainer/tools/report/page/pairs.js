// What the pages of an evaluation share: data, elements, and videos of one row that start together.
"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const get = (id) => document.getElementById(id);

function element(tag, parent, text, kind) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  if (parent) parent.append(made);
  return made;
}

const addresses = []; // of each video, made when it is first shown
function address(position) {
  const [head, text] = DATA.videos[position].split(","), type = head.slice(5, head.indexOf(";"));
  addresses[position] ??= URL.createObjectURL(new Blob([Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0))], { type }));
  return addresses[position];
}

// Videos of one row play from the first frame together, as soon as all of them can.
function videos(places) {
  const made = places.map(({ parent, position }) => {
    if (DATA.videos[position].startsWith("data:image")) { // a video of one frame
      const still = element("img", parent);
      still.addEventListener("load", () => still.classList.toggle("small", still.naturalWidth < 192));
      return Object.assign(still, { src: address(position) });
    }
    const one = element("video", parent);
    Object.assign(one, { muted: true, loop: true, playsInline: true, src: address(position) });
    one.addEventListener("loadedmetadata", () => one.classList.toggle("small", one.videoWidth < 192));
    one.addEventListener("error", () => one.replaceWith(element("div", null, "This browser does not decode H.264.", "empty")));
    return one;
  });
  const moving = made.filter((one) => one.localName === "video");
  const ready = moving.map((one) => new Promise((done) => { one.addEventListener("canplay", done, { once: true }); }));
  Promise.all(ready).then(() => moving.forEach((one) => { if (one.isConnected) one.play().catch(() => { one.controls = true; }); }));
  return made;
}
