"""Ways out of the package, and back: what other libraries and other processes go on with.

``caches`` gives a cache the forms that others read: tuples of tensors, the caches of
``transformers``, a file. Nothing that learners read imports this room. Another library is imported
inside the function that needs it. A new form belongs here, in a file of its own, with the way back
beside it; what is converted is not changed for its sake.
"""
