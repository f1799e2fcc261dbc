"""What learners and teachers get: exercises, plans of weeks, sheets, slides, files to hand out.

The guide itself is `docs/teaching.md`; its tables are those of `plans`.
"""
