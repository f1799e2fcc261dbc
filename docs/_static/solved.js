// Ticks for solved exercises. This browser keeps them; nothing is sent anywhere.
(function () {
  "use strict";
  const KEY = "lm_from_scratch.solved";
  const box = document.querySelector(".solved-box");
  if (!box) return;
  const names = box.dataset.names.split(" ");
  const status = box.querySelector("[role=status]");
  const ticks = new Map(); // the checkbox of an exercise, where this page has one
  const links = []; // every other link to an exercise
  let solved = read() || new Set();

  // Null where a browser keeps nothing: then ticks last as long as the page.
  function read() {
    try {
      const kept = JSON.parse(localStorage.getItem(KEY) || "[]");
      return new Set(Array.isArray(kept) ? kept.filter((name) => typeof name === "string") : []);
    } catch (error) {
      return error instanceof SyntaxError ? new Set() : null;
    }
  }

  function keep() {
    try {
      localStorage.setItem(KEY, JSON.stringify([...solved].sort()));
      return true;
    } catch {
      return false;
    }
  }

  function show(kept) {
    for (const [name, tick] of ticks) tick.checked = solved.has(name);
    for (const [name, link] of links) link.classList.toggle("is-solved", solved.has(name));
    const count = names.filter((name) => solved.has(name)).length;
    status.textContent = count + " of " + names.length + " solved" + (kept ? "" : " (not kept by this browser)");
  }

  function listen(name, tick) {
    ticks.set(name, tick);
    tick.addEventListener("change", function () {
      solved = read() || solved; // another tab may have ticked something since
      if (tick.checked) solved.add(name);
      else solved.delete(name);
      show(keep());
    });
  }

  const own = box.querySelector("input");
  if (own) listen(box.dataset.name, own);
  for (const link of document.querySelectorAll(".bd-article a[href], .bd-sidebar-primary a[href]")) {
    const [, name] = link.pathname.match(/\/exercises\/(\w+)\.html$/) || [];
    if (!names.includes(name) || link.hash) continue;
    const cell = link.closest("td");
    if (own || !cell || ticks.has(name)) {
      links.push([name, link]);
      continue;
    }
    const tick = document.createElement("input");
    tick.type = "checkbox";
    tick.setAttribute("aria-label", "Solved: " + link.textContent.trim());
    link.before(tick, " ");
    listen(name, tick);
  }

  function again() {
    const kept = read();
    solved = kept || solved;
    show(kept !== null);
  }
  window.addEventListener("storage", (event) => { if (!event.key || event.key === KEY) again(); });
  window.addEventListener("pageshow", again); // back from another page
  box.hidden = false;
  again();
})();
