/* From text to token ids and back: byte-level byte-pair encoding, as in text/tokenizer.py.
 *
 * Text is cut into words, each word into the bytes of its UTF-8, and the bytes are merged in the
 * order in which the merges were learned.
 */
"use strict";

/* Words, numbers, signs, each with the space before it; else a run of spaces. JavaScript's own \s
 * is another set than that of the tokenizers library: U+FEFF is in it, U+0085 is not. */
const SPACE = "\\p{White_Space}";
const WORDS = new RegExp(
  `'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^${SPACE}\\p{L}\\p{N}]+|` +
    `${SPACE}+(?![^${SPACE}])|${SPACE}+`,
  "gu",
);

lm.Tokenizer = class {
  /* From the contents of tokenizer.json. */
  constructor({ model, added_tokens }) {
    this.ids = new Map(Object.entries(model.vocab));
    this.pieces = [];
    for (const [piece, id] of this.ids) this.pieces[id] = piece;
    this.ranks = new Map(model.merges.map((pair, rank) => [pair.join(" "), rank]));
    this.special = new Set(added_tokens.map(({ id }) => id));
    this.bytesOf = new Map(lm.byteLetters().map((letter, byte) => [letter, byte]));
    this.words = new Map(); // what has been encoded before
  }

  encode(text) {
    return text.match(WORDS)?.flatMap((word) => this.encodeWord(word)) ?? [];
  }

  encodeWord(word) {
    if (this.words.size > 10000) this.words.clear();
    if (!this.words.has(word)) {
      const letters = lm.byteLetters();
      let pieces = [...new TextEncoder().encode(word)].map((byte) => letters[byte]);
      for (;;) {
        // the pair of neighbours that was learned first
        let first = Infinity;
        for (let i = 0; i + 1 < pieces.length; i++) {
          first = Math.min(first, this.ranks.get(`${pieces[i]} ${pieces[i + 1]}`) ?? Infinity);
        }
        if (first === Infinity) break;
        pieces = this.merge(pieces, first);
      }
      this.words.set(word, pieces.map((piece) => this.ids.get(piece)));
    }
    return this.words.get(word);
  }

  /* Replace every occurrence of a pair by one piece, from left to right. */
  merge(pieces, rank) {
    const merged = [];
    for (let i = 0; i < pieces.length; i++) {
      const found = this.ranks.get(`${pieces[i]} ${pieces[i + 1]}`) === rank;
      merged.push(found ? pieces[i] + pieces[++i] : pieces[i]);
    }
    return merged;
  }

  /* The bytes of a token: a part of a character, perhaps. */
  bytes(id) {
    return Uint8Array.from(this.pieces[id], (letter) => this.bytesOf.get(letter));
  }

  /* The text of tokens; special ones have none. */
  decode(ids) {
    const bytes = ids.filter((id) => !this.special.has(id)).flatMap((id) => [...this.bytes(id)]);
    return new TextDecoder("utf-8", { ignoreBOM: true }).decode(Uint8Array.from(bytes));
  }
};

/* A visible letter for each of the 256 bytes: itself, or one from U+0100 on. */
lm.byteLetters = function () {
  if (!lm.letters) {
    let next = 256;
    const visible = (b) => (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
    lm.letters = Array.from({ length: 256 }, (_, b) => String.fromCodePoint(visible(b) ? b : next++));
  }
  return lm.letters;
};
