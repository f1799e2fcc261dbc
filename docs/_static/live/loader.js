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
  const ENGINE = "tensor kernel tokenizer attention gpt2 qwen2 sampling generate widget".split(" ");
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

  /* The widget of a place, and the scripts and models that it asks for. */
  async function load({ dataset }) {
    for (const name of [...ENGINE, `widgets/${dataset.widget}`]) await script(name);
    const { scripts = [], models = [dataset.model] } = lm.widgets[dataset.widget];
    await Promise.all([...scripts, ...models.map((model) => `models/${model}`)].map(script));
  }

  /* A widget that starts by itself says nothing aloud, and leaves the keyboard where it is. */
  async function start(place, asked = true) {
    const say = (text) => {
      for (const status of place.querySelectorAll(asked ? ".live-status, [role=status]" : ".live-status")) status.textContent = text;
    };
    say(t("Loading the model."));
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
    if (!asked) return;
    place.tabIndex = -1; // the keyboard goes on from here
    place.focus({ preventScroll: true });
  }

  // another link with a state, in the same tab
  addEventListener("hashchange", () => /^#live-[^?]*\?/.test(location.hash) && location.reload());

  // who asks for little motion, or for little data, starts a widget by its button
  const sparing = matchMedia("(prefers-reduced-motion: reduce)").matches || navigator.connection?.saveData;

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
      } else if ("starts" in place.dataset && !sparing) {
        const sight = new IntersectionObserver((seen) => {
          if (!seen.some((one) => one.isIntersecting)) return;
          sight.disconnect();
          start(place, false);
        });
        sight.observe(place);
      }
    }
  });
})();
