"""From logits to text: choosing a token, and the loops around that choice.

Read ``sampling`` and ``logit_processors`` (one token), ``generate`` (the loop), ``text`` (from text
to text), then as you need them ``beam_search``, ``speculative`` (drafts that are checked in one
pass) and ``engine`` (many ``requests`` at once). A new rule for choosing is a filter in
``sampling`` or a function in ``logit_processors``; the loops stay as they are.
"""
