"""One module for each exercise: its reference, cases, hints, and answers right and wrong."""
