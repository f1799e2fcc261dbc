"""Residual streams: the doubly stochastic mix and its laws, beside that of transformers."""

import itertools

import pytest
import torch
from tiny_models import enlarge_

from lm_from_scratch.layers.hyper_connections import (
    HyperConnection,
    HyperHead,
    Mix,
    collapse,
    connect,
    sinkhorn,
)


def positive(n: int, *shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, n, n, generator=generator, dtype=torch.float64).exp()


@pytest.mark.parametrize("n", [1, 2, 4, 7])
def test_rows_and_columns_sum_to_one(n: int) -> None:
    mixed = sinkhorn(positive(n, 3, 5), rounds=200, eps=0.0)
    assert (mixed >= 0).all()
    for dim in (-1, -2):
        torch.testing.assert_close(mixed.sum(dim), torch.ones(3, 5, n, dtype=torch.float64))


def test_columns_are_exact_after_any_number_of_rounds_and_rows_come_nearer() -> None:
    matrix, errors = positive(4, 50), []
    for rounds in (1, 2, 4, 8, 20):
        mixed = sinkhorn(matrix, rounds, eps=0.0)
        assert (mixed.sum(-2) - 1).abs().max() < 1e-12
        errors.append(float((mixed.sum(-1) - 1).abs().max()))
    assert all(after < before for before, after in itertools.pairwise(errors)) and errors[-1] < 1e-3


def test_what_scales_rows_and_columns_alone_leaves_no_trace() -> None:
    """So the result depends on the cross ratios of the matrix: as Sinkhorn and Knopp prove."""
    matrix, rows, columns = positive(4, 3), positive(4, 3, seed=1), positive(4, 3, seed=2)
    other = matrix * rows[..., :1] * columns[..., :1, :]
    assert not torch.allclose(other, matrix)
    torch.testing.assert_close(sinkhorn(other, 300, 0.0), sinkhorn(matrix, 300, 0.0))


def test_a_product_of_mixes_is_one_and_no_mix_makes_streams_longer() -> None:
    mixes = sinkhorn(positive(4, 32), rounds=100, eps=0.0)
    product = torch.linalg.multi_dot([*mixes])
    for dim in (0, 1):
        torch.testing.assert_close(product.sum(dim), torch.ones(4, dtype=torch.float64))
    assert torch.linalg.matrix_norm(mixes, 2).max() < 1 + 1e-9
    streams = torch.randn(2, 3, 4, 6, dtype=torch.float64)
    y, zero = torch.zeros(2, 3, 6, dtype=torch.float64), torch.zeros(2, 3, 4, dtype=torch.float64)
    after = connect(streams, y, Mix(zero, zero, mixes[:6].view(2, 3, 4, 4)))
    torch.testing.assert_close(after.mean(2), streams.mean(2))
    assert (after.norm(dim=(-1, -2)) <= streams.norm(dim=(-1, -2))).all()


def test_one_stream_is_a_residual_connection() -> None:
    hyper = HyperConnection(6, 1, rounds=50, eps=1e-12)
    streams, y = torch.randn(2, 3, 1, 6), torch.randn(2, 3, 6)
    mix = hyper(streams)
    want = streams + mix.write[..., None] * y[:, :, None]
    torch.testing.assert_close(connect(streams, y, mix), want)


def test_row_j_of_the_mix_says_what_becomes_of_stream_j() -> None:
    carry = torch.tensor([[0.0, 1.0], [1.0, 0.0]]).expand(1, 1, 2, 2)
    carry = torch.stack([carry[..., 0, :], torch.tensor([[[0.25, 0.75]]])], dim=-2)
    streams = torch.eye(2)[None, None]
    zero = torch.zeros(1, 1, 2)
    after = connect(streams, torch.zeros(1, 1, 2), Mix(zero, zero, carry))
    torch.testing.assert_close(after[0, 0], torch.tensor([[0.0, 0.25], [1.0, 0.75]]))


@pytest.mark.parametrize("n", [1, 3, 4])
def test_it_is_that_of_transformers(n: int) -> None:
    module = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    from transformers import DeepseekV4Config

    config = DeepseekV4Config(
        hidden_size=10, hc_mult=n, hc_sinkhorn_iters=3, hc_eps=1e-3, rms_norm_eps=1e-2
    )
    theirs, ours = module.DeepseekV4HyperConnection(config), HyperConnection(10, n, 3, 1e-3, 1e-2)
    enlarge_(theirs)
    ours.load_state_dict(theirs.state_dict())
    streams = torch.randn(2, 5, n, 10)
    mix = ours(streams)
    write, carry, collapsed = theirs(streams)
    torch.testing.assert_close((mix.write, mix.carry), (write, carry))
    torch.testing.assert_close(collapse(streams, mix.read), collapsed)
    their_head, head = module.DeepseekV4HyperHead(config), HyperHead(10, n, 1e-3, 1e-2)
    enlarge_(their_head)
    head.load_state_dict(their_head.state_dict())
    torch.testing.assert_close(head(streams), their_head(streams))
