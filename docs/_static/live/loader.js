/* What a page with a live model needs before its reader asks for it: a button.
 *
 * The engine and the weights come as scripts, which a page may load from a disk as well as from a
 * server: once for all widgets, when a pointer or the keyboard comes near.
 */
"use strict";

(function () {
  const here = document.currentScript.src.replace(/loader\.js.*/, "");
  const ENGINE = "tensor tokenizer attention gpt2 qwen2 sampling generate widget".split(" ");
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
          element.onerror = () => {
            loading.delete(name); // the next click tries again
            reject(new Error(`${name}.js cannot be read`));
          };
          document.head.append(element);
        }),
      );
    }
    return loading.get(name);
  }

  /* The widget of a place, and the models that it asks for. */
  async function load({ dataset }) {
    await Promise.all([...ENGINE, `widgets/${dataset.widget}`].map(script));
    const models = lm.widgets[dataset.widget].models ?? [dataset.model];
    await Promise.all(models.map((model) => script(`models/${model}`)));
  }

  async function start(place) {
    const status = place.querySelector(".live-status");
    const button = place.querySelector(".live-start");
    button.disabled = true;
    status.textContent = "The model is loading, some megabytes, once.";
    try {
      await load(place);
      place.querySelector(".live-picture").remove();
      button.parentElement.remove();
      status.textContent = "";
      lm.widgets[place.dataset.widget](place, lm.shipped(place.dataset.model));
      place.tabIndex = -1; // the keyboard goes on from here
      place.focus({ preventScroll: true });
    } catch (error) {
      button.disabled = false;
      status.textContent = `The model could not be loaded: ${error.message}`;
    }
  }

  document.addEventListener("DOMContentLoaded", () => {
    for (const place of document.querySelectorAll(".live")) {
      const button = place.querySelector(".live-start");
      button.hidden = false;
      button.addEventListener("click", () => start(place));
      for (const near of ["pointerenter", "focusin"]) {
        place.addEventListener(near, () => load(place).catch(() => {}), { once: true });
      }
      // a link with a state asks for it at once
      if (location.hash.startsWith(`#${place.id}?`)) {
        place.scrollIntoView();
        start(place);
      }
    }
  });
})();
