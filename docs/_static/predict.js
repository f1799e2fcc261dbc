// A prediction is marked right or wrong, and its answer opens. The arrow keys only move among the
// choices; Space, Enter, a click, or opening the answer decides.
(function () {
  "use strict";
  const t = (text) => (typeof lmWords === "undefined" ? text : lmWords[text] || text);
  const parts = [...document.querySelectorAll("fieldset.predict, details.answer")];

  parts.forEach(function (question, place) {
    const answer = parts[place + 1];
    if (question.tagName !== "FIELDSET") return;
    const choices = [...question.querySelectorAll("label")];
    const right = question.dataset.right;
    const said = question.appendChild(document.createElement("p"));
    said.className = "predict-said";
    said.setAttribute("role", "status");
    let moving = false;

    function decide() {
      const chosen = choices.findIndex((label) => label.firstChild.checked);
      if (chosen < 0) return;
      if (right !== undefined) {
        const isRight = chosen === Number(right), best = choices[right];
        choices.forEach(function (label, i) {
          label.classList.toggle("is-right", isRight && i === chosen);
          label.classList.toggle("is-wrong", !isRight && i === chosen);
        });
        if (isRight) said.textContent = t("Right.");
        else if (!best) said.textContent = t("Not quite: none of them. The answer says why.");
        else {
          const sentence = t("Not quite: the right choice is “{choice}”. The answer says why.");
          said.textContent = sentence.replace("{choice}", () => best.textContent.trim().replace(/[.。]$/, ""));
        }
      }
      if (answer && answer.tagName === "DETAILS") answer.open = true;
    }

    question.addEventListener("keydown", function (event) {
      moving = event.key.startsWith("Arrow");
      if (event.key === "Enter") decide();
    });
    question.addEventListener("pointerdown", () => { moving = false; });
    question.addEventListener("click", function (event) {
      if (!moving && event.target.matches("input")) decide();
    });
    if (answer && answer.tagName === "DETAILS") answer.addEventListener("toggle", () => { if (answer.open) decide(); });
  });
})();
