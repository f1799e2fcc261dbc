"""Answers to the exercise merge_pair, written from its text alone."""

import itertools
from collections import Counter, defaultdict


def count(words, counts):
    table = defaultdict(int)
    for w, n in zip(words, counts):
        for k in range(len(w) - 1):
            table[w[k], w[k + 1]] += n
    return table


def winner(table):
    most = max(table.values())
    return min(p for p, n in table.items() if n == most)


def replaced(word, pair, new_id):
    out, k = [], 0
    while k < len(word):
        if tuple(word[k : k + 2]) == pair:
            out.append(new_id)
            k += 2
        else:
            out.append(word[k])
            k += 1
    return out


def step(words, new_id, table, choose=winner, replace=replaced):
    if not table:
        return None, words
    pair = choose(table)
    return pair, [replace(w, pair, new_id) for w in words]


def right_while(words, counts, new_id):
    return step(words, new_id, count(words, counts))


def right_sorted(words, counts, new_id):
    ranked = sorted(count(words, counts).items(), key=lambda item: (-item[1], *item[0]))
    if not ranked:
        return None, [list(w) for w in words]
    pair = ranked[0][0]
    out = []
    for w in words:
        w = list(w)
        k = 0
        while k < len(w) - 1:
            if (w[k], w[k + 1]) == pair:
                w[k : k + 2] = [new_id]
            k += 1
        out.append(w)
    return pair, out


def counts_ignored(words, counts, new_id):
    return step(words, new_id, count(words, [1] * len(words)))


def count_of_last_word(words, counts, new_id):
    table = {p: n for w, n in zip(words, counts) for p in itertools.pairwise(w)}
    return step(words, new_id, table)


def once_per_word(words, counts, new_id):
    table = Counter()
    for w, n in zip(words, counts):
        for p in set(itertools.pairwise(w)):
            table[p] += n
    return step(words, new_id, table)


def overlaps_not_counted(words, counts, new_id):
    table = Counter()
    for w, n in zip(words, counts):
        last = None
        for k, p in enumerate(itertools.pairwise(w)):
            if last == (p, k - 1):
                last = None
                continue
            table[p] += n
            last = (p, k)
    return step(words, new_id, table)


def first_met_wins(words, counts, new_id):
    return step(words, new_id, count(words, counts), lambda t: max(t, key=t.get))


def largest_wins(words, counts, new_id):
    return step(words, new_id, count(words, counts), lambda t: max((n, p) for p, n in t.items())[1])


def smaller_second_wins(words, counts, new_id):
    table = count(words, counts)
    return step(words, new_id, table, lambda t: min(t, key=lambda p: (-t[p], p[1], p[0])))


def smaller_first_then_any(words, counts, new_id):
    table = count(words, counts)
    return step(words, new_id, table, lambda t: min(t, key=lambda p: (-t[p], p[0])))


def ties_by_text(words, counts, new_id):
    table = count(words, counts)
    return step(words, new_id, table, lambda t: min(t, key=lambda p: (-t[p], str(p))))


def order_ignored(words, counts, new_id):
    table = Counter()
    for w, n in zip(words, counts):
        for a, b in itertools.pairwise(w):
            table[min(a, b), max(a, b)] += n
    return step(words, new_id, table)


def pairs_across_words(words, counts, new_id):
    table = Counter()
    flat = [(i, n) for w, n in zip(words, counts) for i in w]
    for (a, n), (b, _) in itertools.pairwise(flat):
        table[a, b] += n
    return step(words, new_id, table)


def from_right_to_left(words, counts, new_id):
    def backwards(word, pair, new):
        return replaced(word[::-1], pair[::-1], new)[::-1]

    return step(words, new_id, count(words, counts), replace=backwards)


def ids_used_twice(words, counts, new_id):
    def overlapping(word, pair, new):
        out, used = [], False
        for k, i in enumerate(word):
            if tuple(word[k : k + 2]) == pair:
                out.append(new)
                used = True
            elif not used:
                out.append(i)
            else:
                used = False
        return out

    return step(words, new_id, count(words, counts), replace=overlapping)


def last_id_lost(words, counts, new_id):
    def short(word, pair, new):
        out, k = [], 0
        while k < len(word) - 1:
            hit = (word[k], word[k + 1]) == pair
            out.append(new if hit else word[k])
            k += 2 if hit else 1
        return out

    return step(words, new_id, count(words, counts), replace=short)


def only_first_place(words, counts, new_id):
    def once(word, pair, new):
        for k in range(len(word) - 1):
            if (word[k], word[k + 1]) == pair:
                return word[:k] + [new] + word[k + 2 :]
        return word

    return step(words, new_id, count(words, counts), replace=once)


def new_id_added_second_left(words, counts, new_id):
    def keep(word, pair, new):
        return [new if tuple(word[k : k + 2]) == pair else i for k, i in enumerate(word)]

    return step(words, new_id, count(words, counts), replace=keep)


def by_text(words, counts, new_id):
    def text(word, pair, new):
        joined = " ".join(map(str, word)).replace(f"{pair[0]} {pair[1]}", str(new))
        return [int(i) for i in joined.split()]

    return step(words, new_id, count(words, counts), replace=text)


def callers_lists_changed(words, counts, new_id):
    table = count(words, counts)
    if not table:
        return None, words
    pair = winner(table)
    for w in words:
        w[:] = replaced(w, pair, new_id)
    return pair, words


def outer_list_changed(words, counts, new_id):
    table = count(words, counts)
    if not table:
        return None, words
    pair = winner(table)
    for k in range(len(words)):
        words[k] = replaced(words[k], pair, new_id)
    return pair, words


def equal_words_joined(words, counts, new_id):
    unique = dict(zip(map(tuple, words), counts))
    return step([list(w) for w in unique], new_id, count(unique, unique.values()))


def words_without_pair_dropped(words, counts, new_id):
    return step([w for w in words if len(w) > 1], new_id, count(words, counts))


def pair_is_a_list(words, counts, new_id):
    pair, new = right_while(words, counts, new_id)
    return pair and list(pair), new


def crash_without_pairs(words, counts, new_id):
    pair = winner(count(words, counts))
    return pair, [replaced(w, pair, new_id) for w in words]


def no_words_without_pairs(words, counts, new_id):
    return right_while(words, counts, new_id) if count(words, counts) else (None, [])


def only_none_without_pairs(words, counts, new_id):
    return right_while(words, counts, new_id) if count(words, counts) else None


def returns_the_count_too(words, counts, new_id):
    pair, new = right_while(words, counts, new_id)
    return (pair, count(words, counts)[pair]), new


def merges_again(words, counts, new_id):
    def chain(word, pair, new):
        out = []
        for i in word:
            if out and ((out[-1], i) == pair or (out[-1] == new and i == pair[1])):
                out[-1] = new
            else:
                out.append(i)
        return out

    return step(words, new_id, count(words, counts), replace=chain)


ANSWERS = {
    counts_ignored: "each word counts once, however frequent it is",
    count_of_last_word: "a pair has the count of the last word that holds it",
    once_per_word: "a pair counts once for each word that holds it",
    overlaps_not_counted: "pairs that overlap are counted as one",
    first_met_wins: "the first pair found wins a tie",
    largest_wins: "the larger ids win a tie",
    smaller_second_wins: "the second id decides a tie before the first",
    smaller_first_then_any: "of equal first ids the second is not looked at",
    ties_by_text: "ids are ordered as texts, 10 before 9",
    order_ignored: "a pair and its reverse are counted together",
    pairs_across_words: "a pair reaches from one word into the next",
    from_right_to_left: "replaced from right to left",
    ids_used_twice: "an id is used twice: 7 7 7 becomes 300 300",
    last_id_lost: "the last id of a word is lost",
    only_first_place: "only the first occurrence in a word is replaced",
    new_id_added_second_left: "the second id of the pair stays behind the new id",
    by_text: "replaced as text: 12 3 is found in 112 3",
    callers_lists_changed: "written into the caller's words",
    outer_list_changed: "written into the caller's words",
    equal_words_joined: "equal words become one",
    words_without_pair_dropped: "words of one id are left out",
    pair_is_a_list: "",
    crash_without_pairs: "a pair is looked for where there is none",
    no_words_without_pairs: "",
    only_none_without_pairs: "",
    returns_the_count_too: "",
    merges_again: "the new id swallows what follows: 7 7 7 becomes 300",
}
RIGHT = [right_while, right_sorted]
SILENT = [last_id_lost, crash_without_pairs]
