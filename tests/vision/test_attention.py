import pytest
import torch
from vision_driver import relative_error

from mmserve.kernels.cpu import varlen_attention
from mmserve.layers.linear import Linear
from mmserve.quantization.dense import DenseWeight
from mmserve.vision.attention import PackedSelfAttention

LENGTHS = [[1], [7], [4, 4, 4], [5, 5, 2, 5, 1, 1, 9], [1, 2, 3]]


def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], scale: float) -> torch.Tensor:
    """Over all pairs in float64, with those of other sequences masked."""
    q, k, v = q.double(), k.double(), v.double()
    owners = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    scores = torch.einsum("ihd,jhd->hij", q, k) * scale
    scores = scores.masked_fill(owners[:, None] != owners, float("-inf"))
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_every_sequence_sees_all_of_itself_alone(lengths: list[int]) -> None:
    """Over views, as a fused product gives them."""
    q, k, v = torch.randn(sum(lengths), 6, 12).chunk(3, dim=1)
    found = varlen_attention(q, k, v, lengths, 0.3)
    assert relative_error(found.double(), naive(q, k, v, lengths, 0.3)) < 1e-5


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_the_layer_without_rotary(lengths: list[int]) -> None:
    """Queries, keys and values stand one after the other, and each has its heads in order."""
    num_heads, size = 2, 12
    weights = [torch.randn(size, size) for _ in range(4)]
    layer = PackedSelfAttention(Linear(DenseWeight(torch.cat(weights[:3]))), Linear(DenseWeight(weights[3])), num_heads)
    x = torch.randn(sum(lengths), size)
    q, k, v = ((x @ weight.T).view(-1, num_heads, size // num_heads) for weight in weights[:3])
    expected = naive(q, k, v, lengths, (size // num_heads) ** -0.5).flatten(1) @ weights[3].T.double()
    assert relative_error(layer(x, lengths).double(), expected) < 1e-5
