// A live page: asks for itself again, and shows what changed.
"use strict";
const badge = document.getElementById("renewed");
let tag = null, waiting = null;

function renewAlways(show) {
  const again = async () => {
    clearTimeout(waiting);
    waiting = setTimeout(again, 1000 * Number(badge.dataset.seconds));
    if (document.hidden) return;
    let trouble = "";
    try {
      const answer = await fetch(location.href, { cache: "no-store", headers: tag ? { "If-None-Match": tag } : {} });
      if (answer.status === 200) {
        tag = answer.headers.get("ETag");
        show(new DOMParser().parseFromString(await answer.text(), "text/html"));
      } else if (answer.status !== 304) trouble = (await answer.text()).trim();
    } catch (error) {
      if (!(error instanceof TypeError)) throw error; // what fetch raises without a connection
      trouble = "the server does not answer";
    }
    badge.classList.toggle("trouble", Boolean(trouble));
    badge.textContent = trouble || `live, ${new Date().toLocaleTimeString("en-GB")}`;
  };
  document.addEventListener("visibilitychange", () => { if (!document.hidden) again(); });
  again();
}
