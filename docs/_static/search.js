// The site's search: what is found first, and below a result what its page is about.
(function () {
  "use strict";

  // -- Ranking, instead of Sphinx's: that wants every word, and nearly all pages have nearly all words -
  // A word of the query counts the more the fewer places have it, and the more prominent it is there.
  const TITLE = 4, WORDS = 4, HEADING = 2.5, ENTRY = 2, TEXT = 1;
  const MANY = 40, ENOUGH = 0.2; // results, and the share of the best one's score that a result needs
  const IGNORED = new Set("vs versus do does did instead use using get keep make".split(" "));

  let places = null; // what can be found: pages, each with its headings, and entries of some pages
  let vocabulary = null; // the stems of all words
  let stemmer = null;

  // The words of a text that count; an identifier is followed by its parts.
  function split(text) {
    const words = splitQuery(text.toLowerCase());
    const told = words.filter((word) => !stopwords.has(word) && !IGNORED.has(word));
    return told.length ? told : words;
  }
  const parts = (word) => (word.includes("_") ? word.split("_").filter((part) => part.length > 1) : []);
  const stems = (text) =>
    split(text).flatMap((word) => [word, ...parts(word)]).map((word) => stemmer.stemWord(word));

  function read() {
    const index = Search._index;
    stemmer = new Stemmer();
    const line = (title) => ({ title, stems: stems(title) });
    const pages = index.docnames.map((name, file) => {
      const { weight, words, entries } = PLACES[name];
      return {
        file, weight, entries, anchor: "", name: line(index.titles[file]), text: new Set(), value: TEXT,
        words: words.split(",").map((phrase) => line(phrase)), headings: [],
      };
    });
    [index.terms, index.titleterms].forEach((terms) =>
      Object.entries(terms).forEach(([term, files]) => {
        const all = [term, ...parts(term).map((part) => stemmer.stemWord(part))];
        [].concat(files).forEach((file) => all.forEach((stem) => pages[file].text.add(stem)));
      }));
    Object.entries(index.alltitles).forEach(([title, where]) =>
      where.forEach(([file, anchor]) => {
        if (anchor !== null && title !== index.titles[file])
          pages[file].headings.push({ ...line(title), anchor: "#" + anchor });
      }));
    places = pages.slice();
    pages.filter((page) => page.entries).forEach((page) => {
      Object.assign(page, { headings: [], text: new Set() }); // those of its entries
      page.entries.forEach(([weight, anchor, title, text]) =>
        places.push({
          file: page.file, weight, anchor: "#" + anchor, name: line(title), text: new Set(stems(text)), value: ENTRY,
          words: [], headings: [],
        }));
    });
    vocabulary = new Set();
    places.forEach((place) =>
      [place.name, ...place.words, ...place.headings, { stems: place.text }].forEach((one) =>
        one.stems.forEach((stem) => vocabulary.add(stem))));
  }

  // The stems for a word of the query, and how well each fits: quantize is quantise, and beginnings will do.
  function forms(word) {
    const stem = stemmer.stemWord(word);
    const same = [stem, stem.replace("iz", "is"), stem.replace("is", "iz")].filter((form) => vocabulary.has(form));
    const longer = same.length || stem.length < 4 ? [] : [...vocabulary].filter((form) => form.startsWith(stem));
    return [...same.map((form) => [form, 1]), ...longer.map((form) => [form, 0.5])];
  }
  const fit = (forms, has) => forms.reduce((best, [form, value]) => (value > best && has(form) ? value : best), 0);
  // An identifier fits as a whole, or a little less well by its parts.
  function match(term, has) {
    const whole = fit(term.forms, has);
    if (whole || !term.parts.length) return whole;
    return (0.6 * term.parts.reduce((sum, forms) => sum + fit(forms, has), 0)) / term.parts.length;
  }
  const matchLine = (terms, line) => terms.map((term) => match(term, (stem) => line.stems.includes(stem)));
  // How much of a line the query says.
  function share(terms, line) {
    const said = (stem) => terms.some((term) => match(term, (form) => form === stem) > 0.5);
    return line.stems.filter(said).length / (line.stems.length || 1);
  }
  const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);

  function rank(query) {
    if (!places) read();
    const terms = [...new Set(split(query))].map((word) => ({ forms: forms(word), parts: parts(word).map(forms) }));
    places.forEach((place) => {
      const lines = [[TITLE, place.name], ...place.words.map((phrase) => [WORDS, phrase])];
      const values = terms.map((term) => place.value * match(term, (stem) => place.text.has(stem)));
      lines.forEach(([value, line]) => {
        const found = matchLine(terms, line);
        if (!sum(found)) return;
        const factor = value * (0.5 + 0.5 * share(terms, line));
        found.forEach((fits, i) => (values[i] = Math.max(values[i], factor * fits)));
      });
      place.values = values;
      place.found = place.headings.map((heading) => matchLine(terms, heading));
    });
    const rarity = terms.map((term, i) => {
      const having = places.filter((place) => place.values[i] > 0.5).length;
      return having ? Math.log(1 + places.length / having) : 0;
    });
    const scored = places.map((place) => {
      // With the one heading that says most of the query.
      const with_ = (found) => place.values.map((value, i) => Math.max(value, found ? HEADING * found[i] : 0));
      const score = (values) =>
        sum(values.map((value, i) => rarity[i] * value)) *
        (sum(values.map((value, i) => rarity[i] * Math.min(1, value))) / (sum(rarity) || 1));
      let best = score(with_(null)), heading = null;
      place.found.forEach((found, i) => {
        const value = sum(found) ? score(with_(found)) : 0;
        if (value > best) [best, heading] = [value, { ...place.headings[i], found }];
      });
      if (heading && heading.found.some((fits, i) => rarity[i] && fits < 0.5)) heading = null; // not a link to it
      return { place, heading, score: best * place.weight };
    });
    return order(scored.filter((found) => found.score > 0));
  }

  // The best ones; the first three of different pages.
  function order(found) {
    found.sort((a, b) => b.score - a.score || a.place.name.title.localeCompare(b.place.name.title));
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
    return rank(query).map(({ place, heading, score }) => {
      const own = index.titles[place.file];
      const title = heading ? `${own} > ${heading.title}` : place.anchor ? `${own} > ${place.name.title}` : own;
      const anchor = heading ? heading.anchor : place.anchor;
      return [index.docnames[place.file], title, anchor, null, score, index.filenames[place.file], SearchResultKind.title];
    }).reverse();
  }

  document.addEventListener("DOMContentLoaded", function () {
    Search._performSearch = results;
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
