/* What a page with a live model needs before its reader asks for it: a button.
 *
 * The engine and the weights come as scripts, which a page may load from a disk as well as from a
 * server: once for all widgets, when a pointer or the keyboard comes near.
 */
"use strict";

(function () {
  const here = document.currentScript.src.replace(/loader\.js.*/, "");
  // The version of all files, so that old ones do not meet new ones; and where the models are, from here.
  const { version, models = "" } = document.currentScript.dataset;
  const ENGINE = "tensor tokenizer attention gpt2 qwen2 sampling generate widget".split(" ");
  const t = (text) => (typeof lmWords === "undefined" ? text : lmWords[text] || text); // lm.t comes later
  const loading = new Map(); // what is loaded, or about to be

  function script(name) {
    if (!loading.has(name)) {
      loading.set(
        name,
        new Promise((resolve, reject) => {
          const element = document.createElement("script");
          element.src = `${here}${name.startsWith("models/") ? models : ""}${name}.js?v=${version}`;
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
    for (const name of [...ENGINE, `widgets/${dataset.widget}`]) await script(name);
    const wanted = lm.widgets[dataset.widget].models ?? [dataset.model];
    await Promise.all(wanted.map((model) => script(`models/${model}`)));
  }

  async function start(place) {
    const say = (text) => {
      for (const status of place.querySelectorAll(".live-status, [role=status]")) status.textContent = text;
    };
    say(t("Loading the model: 6 MB, once; 12 MB for two."));
    try {
      await load(place);
    } catch (error) {
      say(t("The model could not be loaded:") + ` ${error.message}`);
      return;
    }
    if (!place.querySelector(".live-picture")) return; // two clicks
    place.querySelector(".live-picture").remove();
    place.querySelector(".live-start").parentElement.remove();
    say("");
    lm.widgets[place.dataset.widget](place, lm.shipped(place.dataset.model));
    place.append(place.querySelector(".live-signs"));
    place.tabIndex = -1; // the keyboard goes on from here
    place.focus({ preventScroll: true });
  }

  // another link with a state, in the same tab
  addEventListener("hashchange", () => /^#live-[^?]*\?/.test(location.hash) && location.reload());

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
