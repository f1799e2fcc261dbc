"""The same functions as Triton kernels, for a GPU.

Each has the name, the arguments and the result of the function that it stands beside; the plain
PyTorch of that one is what the kernel is tested against. A kernel may be faster, and never means
something else. :func:`~lm_from_scratch.kernels.model.use_kernels_` puts them into a built model.

Read ``device`` (where a kernel may run), ``softmax`` (a whole kernel with its gradient), ``matmul``
(tiles) and ``attention``, which is both. ``norm``, ``rope``, ``swiglu``, ``loss`` and ``int8`` are
the other parts of a model, ``decoding`` and ``paged`` attention while it writes, ``adamw`` and
``galore`` the optimizers. ``compilation`` compiles kernels on a machine without a GPU. A new kernel
is a file here, and a line in ``REPLACED`` of ``model`` if a model calls what it replaces.

Only this folder imports Triton, which exists for Linux. A kernel runs on a CUDA device; on a CPU it
runs where the environment variable ``TRITON_INTERPRET=1`` was set before Triton was imported, as
the tests and the notebooks do. Everywhere else it raises: nothing falls back to PyTorch.
"""
