// Names that the theme leaves out, and keyboard access to what scrolls.
(function () {
  "use strict";
  var t = function (text) { return typeof lmWords === "undefined" ? text : lmWords[text] || text; };

  // The arrow beside a chapter opens its list of pages; say which.
  document.querySelectorAll("details > summary").forEach(function (summary) {
    if (summary.textContent.trim() || summary.getAttribute("aria-label")) return;
    var item = summary.closest("li");
    var link = item && item.querySelector("a");
    summary.setAttribute("aria-label", t("Pages of {chapter}").replace("{chapter}", link ? link.textContent.trim() : ""));
  });

  // A voice command "search" reaches a button whose name is what it shows.
  document.querySelectorAll("button.search-button-field, button.search-button__button").forEach(function (button) {
    var shown = button.textContent.trim().replace(/\s+/g, " ");
    if (shown) button.setAttribute("aria-label", shown);
  });

  // The arguments of a long signature are lines, not definitions.
  document.querySelectorAll("dt.sig dl, dt.sig dd").forEach(function (old) {
    var line = document.createElement("span");
    line.className = old.tagName === "DL" ? "sig-lines" : "sig-line";
    line.append.apply(line, old.childNodes);
    old.replaceWith(line);
  });

  function scrollable() {
    document.querySelectorAll("div.math, mjx-container[display], .highlight pre, .figure, .diagram, .pst-scrollable-table-container").forEach(function (box) {
      var wide = box.scrollWidth > box.clientWidth + 1;
      if (wide || box.scrollHeight > box.clientHeight + 1) box.tabIndex = 0;
      if (wide && !box.dataset.scrolls) box.addEventListener("scroll", function () { cue(box); }, { passive: true });
      if (wide) cue(box);
      else delete box.dataset.scrolls;
    });
  }
  // What is cut at the right fades there, until its end is in sight.
  function cue(box) {
    box.dataset.scrolls = box.scrollLeft + box.clientWidth < box.scrollWidth - 2 ? "more" : "end";
  }
  function whenDrawn() {
    var math = window.MathJax && window.MathJax.startup && window.MathJax.startup.promise;
    if (math) math.then(scrollable);
    else scrollable();
  }
  if (document.readyState === "complete") whenDrawn();
  else window.addEventListener("load", whenDrawn);
  window.addEventListener("resize", scrollable);
  document.addEventListener("toggle", scrollable, true); // what was folded has its width now

  // Print what is folded, too.
  var opened = [];
  window.addEventListener("beforeprint", function () {
    opened = Array.from(document.querySelectorAll("details.fold:not([open])"));
    opened.forEach(function (fold) { fold.open = true; });
  });
  window.addEventListener("afterprint", function () {
    opened.forEach(function (fold) { fold.open = false; });
  });
})();
