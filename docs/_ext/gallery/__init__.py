"""The course as a gallery: pages that are scripts, and notebooks on GPU kernels.

Read first: `pages` (which there are, what each says of itself), `folding` (which lines of code can
wait), `running` (how scripts run). Then what becomes of a page: `figures` in it, folds and
questions (`lessons`), what stands around it (`navigation`), what its readers take away
(`downloads`), and the pages on GPU kernels, which run elsewhere (`gpu_notebooks`, `gpu_pages`).
"""
