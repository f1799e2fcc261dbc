"""The bug museum: a card for each mistake, and ten stories."""
