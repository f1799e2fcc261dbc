"""What learners and teachers get: exercises, plans of weeks, sheets, slides, files to hand out.

The guide itself is `docs/teaching.md`; `guide` computes its tables.
"""
