"""Every kernel becomes machine code for three architectures, and fits on them."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed here", exc_type=ImportError)

from compile_kernels import BAD_TILES, compiled_in_a_process

pytestmark = pytest.mark.slow

#: Architectures, and the shared memory that NVIDIA gives a block there.
SHARED_LIMIT = {80: 166_912, 86: 101_376, 90: 232_448}


@pytest.mark.parametrize("arch", SHARED_LIMIT)
def test_every_kernel_compiles_and_fits(arch: int) -> None:
    """One that no launch reaches counts too."""
    compiled_in_a_process(arch, SHARED_LIMIT[arch])


@pytest.mark.parametrize("label", BAD_TILES)
def test_a_bad_tile_is_refused_by_the_compiler_or_by_the_limit(label: str) -> None:
    with pytest.raises(AssertionError):
        compiled_in_a_process(80, SHARED_LIMIT[80], "--bad-tile", label)
