"""Caches and adapters in the forms of other libraries, and back.

``caches`` gives a cache the forms that others read: tuples of tensors, the caches of
``transformers``; ``cache_file`` makes a file of one. ``peft`` writes adapters in the format of that
library. Read any of them alone. Nothing that learners read imports this room, and another library
is imported inside the function that needs it. A new form is a file of its own, with the way back
beside it.
"""
