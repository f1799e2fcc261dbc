// Below a result: what its page is about, or what the term means.
(function () {
  "use strict";
  document.addEventListener("DOMContentLoaded", function () {
    new MutationObserver(function (changes) {
      changes.forEach(function (change) {
        change.addedNodes.forEach(function (item) {
          var link = item.nodeName === "LI" && item.querySelector("a");
          var place = link && link.getAttribute("href").split("?")[0];
          var text = link && (DESCRIPTIONS[place] || DESCRIPTIONS[place.split("#")[0]]);
          if (!text) return;
          var line = item.appendChild(document.createElement("p"));
          line.className = "context";
          line.textContent = text;
        });
      });
    }).observe(document.getElementById("search-results"), { childList: true, subtree: true });
  });
})();
