// The bug museum shows the cards that a reader asks for. The choice is in the address.
(function () {
  "use strict";
  const form = document.querySelector(".museum-filter");
  if (!form) return;
  const status = form.querySelector("[role=status]");
  const groups = [...form.elements.kind.options].slice(1).map(function (option) {
    const heading = [...document.querySelectorAll("section > h2")].find(
      (h2) => h2.firstChild.textContent.trim() === option.text);
    return { kind: option.value, section: heading.parentElement };
  });

  function show() {
    const kind = form.elements.kind.value, chapter = form.elements.chapter.value;
    let count = 0;
    for (const group of groups) {
      let here = 0;
      for (const card of group.section.querySelectorAll(".bug")) {
        const fits = (!kind || kind === group.kind) && (!chapter || card.classList.contains("in-" + chapter));
        card.hidden = !fits;
        here += fits;
      }
      group.section.hidden = !here;
      count += here;
    }
    status.textContent = count + (count === 1 ? " mistake" : " mistakes");
  }

  form.addEventListener("change", function () {
    const chosen = new URLSearchParams();
    for (const select of form.elements) if (select.value) chosen.set(select.name, select.value);
    history.replaceState(null, "", "#" + chosen);
    show();
  });
  form.addEventListener("submit", (event) => event.preventDefault());

  // "#kind=text" chooses, "#bug-g3" is the place of a card, which must be in sight.
  function read() {
    const wanted = new URLSearchParams(location.hash.slice(1));
    for (const select of form.elements) {
      const value = wanted.get(select.name) || "";
      select.value = [...select.options].some((option) => option.value === value) ? value : "";
    }
    show();
  }
  window.addEventListener("hashchange", read);
  form.hidden = false;
  read();
})();
