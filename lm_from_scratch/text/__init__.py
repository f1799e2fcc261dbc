"""From text to the batches that a model trains on.

Read ``tokenizer`` first, then ``corpora`` (where each ``document`` comes from, and which are held
out), ``targets`` (what is to be predicted), ``batches`` (how tokens become rows), and ``labelled``
(texts with a label each, for classifiers). A new source of text belongs in ``corpora``, another way
to cut rows in ``batches``. Nothing here knows a model.

Not to be read, but relied on: ``tokenizer_files`` opens what others have published, and ``chat``
runs their chat templates.
"""
