/* What a page with a live model needs before its reader asks for it: a button.
 *
 * The engine and the weights come as scripts, which a page may load from a disk as well as from a
 * server. They are loaded once, by the first widget that comes near or is clicked.
 */
"use strict";

(function () {
  const here = document.currentScript.src.replace(/loader\.js.*/, "");
  const ENGINE = "tensor tokenizer attention gpt2 qwen2 sampling generate".split(" ");
  const loading = new Map(); // what is loaded, or about to be

  function script(name) {
    if (!loading.has(name)) {
      loading.set(
        name,
        new Promise((resolve, reject) => {
          const element = document.createElement("script");
          element.src = `${here}${name}.js`;
          element.async = false; // in this order
          element.onload = resolve;
          element.onerror = () => reject(new Error(`${name}.js cannot be read`));
          document.head.append(element);
        }),
      );
    }
    return loading.get(name);
  }

  async function start(place) {
    const status = place.querySelector(".live-status");
    status.textContent = "The model is loading: 6 MB, once.";
    try {
      await Promise.all([...ENGINE, "widget", `models/${place.dataset.model}`].map(script));
      await script(`widgets/${place.dataset.widget}`);
      const more = lm.widgets[place.dataset.widget].models ?? [];
      await Promise.all(more.map((name) => script(`models/${name}`)));
      place.querySelector(".live-picture").remove();
      lm.widgets[place.dataset.widget](place, lm.shipped(place.dataset.model));
      status.textContent = "";
      place.classList.add("live-on");
    } catch (error) {
      status.textContent = `The model could not be loaded: ${error.message}`;
    }
  }

  document.addEventListener("DOMContentLoaded", () => {
    for (const place of document.querySelectorAll(".live")) {
      const button = place.querySelector(".live-start");
      button.hidden = false;
      const begin = () => (button.remove(), start(place));
      button.addEventListener("click", begin, { once: true });
      // a link with a state asks for it at once
      if (location.hash.startsWith(`#${place.id}?`)) {
        begin();
        place.scrollIntoView();
      }
    }
  });
})();
