// The page on families shows those that use the ideas a reader asks for. The choice is in the address.
(function () {
  "use strict";
  const form = document.querySelector(".family-filter");
  if (!form) return;
  const status = form.querySelector("[role=status]");
  const cards = [...document.querySelectorAll(".family")];
  const selects = [...form.elements];

  function show() {
    const wanted = selects.map((select) => select.value).filter(Boolean);
    let count = 0;
    for (const card of cards) {
      const fits = wanted.every((name) => card.classList.contains("uses-" + name.replaceAll("_", "-")));
      card.hidden = !fits;
      count += fits;
    }
    status.textContent = count + (count === 1 ? " family" : " families");
  }

  form.addEventListener("change", function () {
    const chosen = new URLSearchParams();
    for (const select of selects) if (select.value) chosen.set(select.name, select.value);
    history.replaceState(null, "", "#" + chosen);
    show();
  });
  form.addEventListener("submit", (event) => event.preventDefault());

  // "#uses=latent&and=sparse" chooses.
  function read() {
    const wanted = new URLSearchParams(location.hash.slice(1));
    for (const select of selects) {
      const value = wanted.get(select.name) || "";
      select.value = [...select.options].some((option) => option.value === value) ? value : "";
    }
    show();
  }
  window.addEventListener("hashchange", read);
  form.hidden = false;
  read();
})();
