"""Models that run in a page: the place of a widget, the picture that is there first, the tour."""
