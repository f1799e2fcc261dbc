"""How a language model works, down to the tensor: a small package to read and to run.

The modules are the public surface. Import from them directly::

    from lm_from_scratch.models.gpt2 import GPT2Config, GPT2LMHeadModel

Each folder is a room, whose ``__init__`` says what it is for, what to read first, and what to
change where. Begin with ``text``, then ``models``.
"""

__version__ = "0.1.0"
