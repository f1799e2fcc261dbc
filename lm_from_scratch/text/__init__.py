"""From text to the batches that a model trains on.

Read ``tokenizer`` first, then ``corpora`` (where each ``document`` comes from, and which are held
out), ``targets`` (what is to be predicted), ``batch`` (what a model is given), ``batches`` (how
tokens become rows), and ``labelled`` (texts with a label each, for classifiers). After pretraining,
``conversations`` says which tokens of a chat are learned, and ``examples`` reads files of them.
``tasks`` draws questions that a program can check. A new source of text belongs in ``corpora``,
another way to cut rows in ``batches``. Nothing here knows a model.

A corpus of its own are stories of a small world in which it is known where everything is:
``story_grammar`` (its sentences in two languages), ``worlds`` (what follows and checks a story),
``plots`` (what makes them up).

Not to be read, but relied on: ``streaming`` says what new tokens add to a text, ``tokenizer_files``
opens what others have published, by the rules of ``tokenizer_classes``, ``chat`` runs their chat
templates, ``chatml`` is the one of the models that are made here, and ``rows`` cuts a file into
lines, and into training and held out.
"""
