// The site's search: what comes first, and below a result what it is about.
(function () {
  "use strict";

  // -- Ranking, instead of Sphinx's: that wants every word, and long pages have nearly every word -----
  // A word of the query counts the more the fewer places have it, and the more prominent it is there.
  const NAME = 4, HEADING = 2.5, ENTRY = 2, TEXT = 0.7; // an entry's text is short, a page's is long
  const CALLED = 0.95; // what weighs a place beside a lesson if its title is the query; of code, less
  const PARTS = 0.6, BEGINNING = 0.5, ALIKE = 0.8; // of an identifier; of a word; of what means the same
  const MANY = 40, ENOUGH = 0.2; // results, and the share of the best score that one needs
  const COMMON = 10; // a heading of so many pages says nothing about one: Exercises, Summary
  const IGNORED = new Set("vs versus do does did instead use using get keep make makes making explain explained explanation simple simply actually chatgpt llm llms ai work works tutorial tutorials like im want need tell please much many lot really way less should stand stands behind intuition intuitively basically exactly quickly easily explaining mean means meaning example examples called help thing things something anything ever now got getting possible ok happen happens happening different difference differences trying tried pytorch method methods best usage consumption affect point know knows knowing together take takes took better advantages disadvantages benefit benefits purpose reasons preferred normal anyone someone people might may try seem seems go goes going".split(" "));
  // Words that strangers use for each other.
  const SAME = ["big bigger large larger huge giant massive", "math maths mathematics arithmetic sum algebra", "fast faster quick quicker speed speedup runtime", "memory vram ram",
    "parameter param", "gradient grad slope", "attention attn", "perplexity ppl", "small smaller tiny short shorter little", "gpu graphics nvidia", "idle bored unused", "bug mistake flaw",
    "choose pick select decide chosen", "interrupt resume continue stopped pause", "inference generation generate", "padding pad filler", "past cache", "slow slower slowly forever ages hours",
    "delete remove drop", "picture image photo", "conversation chat dialogue dialog message talk", "robot chatbot bot", "circle loop", "calculate compute", "draw plot visualise visualize", "example sample",
    "nonsense gibberish garbage rubbish junk stupid weird strange", "laptop notebook computer pc machine", "answer reply response", "data dataset corpus", "cost price expensive cheap cheaper money",
    "crash killed crashed", "teach teacher lecturer professor", "half fp16 float16", "bf16 bfloat16", "optimizer optim", "layer block", "train trained", "neuron neural", "compress shrink squeeze",
    "unstable diverge explode", "equal tie", "checkpoint ckpt", "huggingface transformers hf", "email mail inbox", "polite manners behave behaviour kind friendly rude nice", "clever smart intelligent good quality",
    "remember memorise recall", "forget unlearn", "speak talk say write", "sort classify categorise assign folder", "invent hallucinate lie", "copy imitate mimic style", "guess predict prediction forecast",
    "people users persons customers", "begin start beginning", "finish end stop", "cut truncate truncated", "hidden inner inside internal", "broken wrong incorrect bad", "stuck flat constant plateau",
    "random chance dice luck", "boring dull repetitive", "creative imaginative", "same identical alike", "understand comprehend", "think reason reasoning", "spelling spell letters characters",
    "homework assignment exercise", "solution solved", "beginner newbie novice dummies", "book novel literature", "author writer", "phone mobile smartphone tablet", "free gratis", "mac macbook apple",
    "download fetch", "split divide distribute spread", "merge combine join fuse", "parallel simultaneously", "wait waiting latency", "energy power electricity", "size gigabytes gb megabytes",
    "student pupil",
    "cheat hack trick", "instruct instruction command obey", "translate translation", "language german french spanish chinese", "output produce"];
  const SPELT = [["iz", "is"], ["is", "iz"], ["yz", "ys"], ["or", "our"], ["our", "or"], ["ll", "l"]]; // in America, in Britain
  const LETTERS = [..."abcdefghijklmnopqrstuvwxyz"];

  let places = null; // what can be found: pages, each with its headings, and the entries of some pages
  let vocabulary = null; // the stems of all words
  let stemmer = null, alike = null; // the groups of SAME, in stems

  // The words of a text that count; a single digit is on most pages.
  const counts = (word) => !stopwords.has(word) && !IGNORED.has(word);
  function split(text) {
    const words = splitQuery(text.toLowerCase());
    const counting = words.filter((word) => counts(word) && !/^\d$/.test(word));
    return counting.length ? counting : words;
  }
  const stem = (word) => stemmer.stemWord(word);
  const parts = (word) => (word.includes("_") ? word.split("_").filter((part) => part.length > 1) : []);
  const pairs = (words) => words.slice(1).map((word, i) => words[i] + word); // LayerNorm is a layer norm, GPT-2 is gpt2
  function stems(text) {
    const words = split(text).flatMap((word) => [word, ...parts(word)]);
    return { stems: words.map(stem), joined: pairs(splitQuery(text.toLowerCase()).filter(counts)).map(stem) };
  }
  const line = (title) => ({ title, ...stems(title) });
  const lines = (words) => words.split(", ").filter(Boolean).map(line);

  function read() {
    const index = Search._index;
    stemmer = new Stemmer();
    alike = SAME.map((group) => group.split(" ").map(stem));
    const pages = index.docnames.map((name, file) => {
      const { weight, words, entries } = PLACES[name];
      const names = [line(index.titles[file].replace(/^\d+\. /, "")), ...lines(words)];
      return { file, anchor: "", weight, names, headings: [], text: new Set(), value: TEXT, entries };
    });
    [index.terms, index.titleterms].forEach((terms) =>
      Object.entries(terms).forEach(([term, files]) =>
        [term, ...parts(term).map(stem)].forEach((known) =>
          [].concat(files).forEach((file) => pages[file].text.add(known)))));
    Object.entries(index.alltitles).forEach(([title, where]) =>
      where.forEach(([file, anchor]) => {
        if (anchor !== null && title !== index.titles[file] && where.length < COMMON)
          pages[file].headings.push({ ...line(title), anchor: "#" + anchor, value: HEADING });
      }));
    Object.entries(index.objects).forEach(([prefix, objects]) =>
      objects.forEach(([file, type, , anchor, name]) => {
        const [domain, kind] = index.objnames[type];
        const whole = prefix ? `${prefix}.${name}` : name;
        const place = { "": whole, "-": `${kind}-${whole}` }[anchor] || anchor; // as Sphinx shortens it
        if (domain === "py") pages[file].headings.push({ ...line(name), anchor: "#" + place, value: NAME });
      }));
    places = pages.slice();
    pages.filter((page) => page.entries).forEach((page) => {
      if (index.docnames[page.file] !== "glossary") page.names.length = 1; // its entries have them
      Object.assign(page, { headings: [], text: new Set() });
      page.entries.forEach(([weight, anchor, title, text, words]) => {
        const names = [line(title), ...lines(words)];
        const own = new Set(stems(text).stems);
        places.push({ file: page.file, anchor: "#" + anchor, weight, names, headings: [], text: own, value: ENTRY });
      });
    });
    vocabulary = new Set();
    places.forEach((place) => {
      place.text.forEach((known) => vocabulary.add(known));
      place.names.concat(place.headings).forEach((line) =>
        line.stems.concat(line.joined).forEach((known) => vocabulary.add(known)));
    });
  }

  // With one letter too many, too few, wrong or swapped, after the first.
  function misspelt(word) {
    const found = new Set();
    for (let i = 1; i <= word.length; i++) {
      const left = word.slice(0, i), [next = "", second = "", ...rest] = word.slice(i), after = second + rest.join("");
      [left + after, left + second + next + rest.join("")].forEach((other) => found.add(stem(other)));
      LETTERS.forEach((letter) => found.add(stem(left + letter + after)).add(stem(left + letter + next + after)));
    }
    return [...found];
  }
  // A word of the query as the index may have it, with how well that fits: quantize is quantise too,
  // and if no text has the word, words that begin with it do, or that are spelt almost like it.
  function forms(word, joined) {
    if (/^\d+b$/.test(word)) word = "7b"; // 13b, 70b: a large model of any size
    const own = stem(word);
    const spelt = SPELT.map(([one, other]) => stem(word.replace(one, other))); // before the stem: normalise and normalize have two
    const same = [own, ...joined.map(stem)];
    const known = same.filter((form) => vocabulary.has(form)).map((form) => [form, 1]);
    spelt.filter((form) => form !== own && vocabulary.has(form)).forEach((form) => known.push([form, ALIKE]));
    alike.filter((group) => group.includes(own)).flat().forEach((form) => known.push([form, ALIKE]));
    if (known.length || own.length < 4) return known;
    const begun = [...vocabulary].filter((form) => form.startsWith(own));
    const near = begun.length ? begun : misspelt(word).filter((form) => form.length > 3 && vocabulary.has(form));
    return near.map((form) => [form, BEGINNING]);
  }
  // What the query asks for; a word that nobody wrote asks for nothing.
  function parse(query) {
    const words = [...new Set(split(query))];
    const joined = pairs(words);
    return words.map((word, i) => ({
      forms: forms(word, joined.slice(Math.max(0, i - 1), i + 1)),
      parts: parts(word).map((part) => forms(part, [])),
    })).filter((term) => term.forms.length || term.parts.some((part) => part.length));
  }

  const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);
  const fit = (forms, has) => Math.max(0, ...forms.map(([form, value]) => (has(form) ? value : 0)));
  const match = (term, has) =>
    fit(term.forms, has) || (PARTS * sum(term.parts.map((part) => fit(part, has)))) / (term.parts.length || 1);
  // How well each word fits a line, and how much of the line the query says.
  function matchLine(terms, line) {
    const found = terms.map((term) => match(term, (form) => line.stems.includes(form) || line.joined.includes(form)));
    if (!sum(found)) return null;
    const said = line.stems.filter((own) => terms.some((term) => match(term, (form) => form === own)));
    return { found, share: Math.min(1, (said.length || 1) / line.stems.length) };
  }

  function rank(query) {
    if (!places) read();
    const terms = parse(query);
    const scored = places.map((place) => {
      let called = false;
      const values = terms.map((term) => place.value * match(term, (form) => place.text.has(form)));
      place.names.forEach((line) => {
        const { found, share } = matchLine(terms, line) || { found: [] };
        const least = line === place.names[0] ? 0.5 : 0.3; // of a title, or of other words for it
        found.forEach((fits, i) => (values[i] = Math.max(values[i], NAME * fits * (least + (1 - least) * share))));
        if (line === place.names[0] && share === 1 && found.every((fits) => fits === 1)) called = true;
      });
      return { place, values, weight: called ? Math.max(place.weight, CALLED * Math.min(1, 2 * place.weight)) : place.weight };
    });
    const rarity = terms.map((term, i) => {
      const having = scored.filter(({ values }) => values[i] > 0.5).length;
      return having ? Math.log(1 + places.length / having) : 0;
    });
    const weighed = (values) => sum(values.map((value, i) => rarity[i] * value));
    // With few of the words, or with common ones only, a place is worth less.
    const score = (values) => (weighed(values) * weighed(values.map((value) => Math.min(1, value)))) / (sum(rarity) || 1);
    scored.forEach((one) => {
      one.score = score(one.values);
      // With the one heading that says most; a heading that says all is where the result leads.
      one.place.headings.forEach((heading) => {
        const { found } = matchLine(terms, heading) || {};
        const value = found ? score(one.values.map((own, i) => Math.max(own, heading.value * found[i]))) : 0;
        if (value <= one.score) return;
        one.score = value;
        one.heading = found.every((fits, i) => fits >= 0.5 || !rarity[i]) ? heading : null;
      });
      one.score *= one.weight;
    });
    return order(scored.filter((one) => one.score > 0));
  }

  // The best ones, the first three of different pages.
  function order(found) {
    found.sort((a, b) => b.score - a.score || a.place.names[0].title.localeCompare(b.place.names[0].title));
    found = found.filter((one) => one.score >= ENOUGH * found[0].score).slice(0, MANY);
    const first = [];
    found.forEach((one) => {
      if (first.length < 3 && first.every((other) => other.place.file !== one.place.file)) first.push(one);
    });
    return first.concat(found.filter((one) => !first.includes(one)));
  }

  // In the form of Sphinx's results, the best one last.
  function results(query) {
    const index = Search._index;
    return rank(query).map(({ place: { file, anchor, names }, heading, score }) => {
      const titles = [index.titles[file], anchor && names[0].title, heading && heading.title].filter(Boolean);
      return [
        index.docnames[file], titles.join(" > "), heading ? heading.anchor : anchor, null, score,
        index.filenames[file], SearchResultKind.title,
      ];
    }).reverse();
  }

  document.addEventListener("DOMContentLoaded", function () {
    Search._performSearch = results;
    // -- Below a result: what its page is about, or what the entry says -------------------------------
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
