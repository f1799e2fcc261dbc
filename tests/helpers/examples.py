"""How often a property is tried: some examples in `make test`, more where the slow tests run."""

from hypothesis import settings


def examples(quick: int, every: int) -> settings:
    """Those of the profile that ``conftest.py`` has chosen before the tests are read."""
    chosen = settings.get_profile("quick").max_examples
    return settings(max_examples=quick if settings().max_examples == chosen else every)
