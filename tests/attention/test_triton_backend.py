"""The backend of GPUs, its kernels interpreted on the CPU, against the backend of CPUs."""

import pytest
import torch

from mmserve.attention.base import AttentionBatch, AttentionLayer
from mmserve.attention.context import ForwardContext
from mmserve.attention.torch_backend import TorchAttention
from mmserve.attention.triton_backend import TritonAttention, num_shared_blocks, padded_tables
from mmserve.errors import SetupError
from mmserve.kernels import reference
from mmserve.kernels.paged_chunk import CHUNK_TILES
from mmserve.kernels.paged_decode import DECODE_TILES, QUERY_ROWS, SHARED_TILES, paged_attention_decode
from mmserve.kernels.paged_tiles import MAX_BLOCK_SIZE, MAX_HEAD_DIM, padded_head_dim

BLOCK_SIZE, HEADS, KV_HEADS, HEAD_DIM = 16, 4, 2, 64
CPU = torch.device("cpu")


def backends() -> tuple[TorchAttention, TritonAttention]:
    ours = TorchAttention(num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, block_size=BLOCK_SIZE, dtype=torch.float32)
    return ours, on_kernels()


def on_kernels(
    *, heads: int = HEADS, kv_heads: int = KV_HEADS, head_dim: int = HEAD_DIM, block_size: int = BLOCK_SIZE
) -> TritonAttention:
    return TritonAttention(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, device=CPU)


def batch(*shapes: tuple[int, int], num_shared: int = 0) -> AttentionBatch:
    """Sequences of `(context, queries)`, their blocks all different but for the first `num_shared`."""
    tables, num_blocks = [], 1 + num_shared
    for context_len, _ in shapes:
        count = -(-context_len // BLOCK_SIZE) - num_shared
        tables.append([*range(1, 1 + num_shared), *range(num_blocks, num_blocks + count)][: num_shared + count])
        num_blocks += count
    return AttentionBatch([queries for _, queries in shapes], [context for context, _ in shapes], tables)


def attend(backend: TorchAttention | TritonAttention, step: AttentionBatch, layer: AttentionLayer) -> torch.Tensor:
    """The result, and after it the cache as it was left, flat."""
    torch.manual_seed(0)
    num_rows, num_blocks = sum(step.query_lens), 1 + max(max(table) for table in step.block_tables)
    cache = torch.randn(num_blocks, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    qkv = torch.randn(num_rows, HEADS + 2 * KV_HEADS, HEAD_DIM)
    cos, sin = torch.randn(2, num_rows, 1, HEAD_DIM).unbind()
    context = ForwardContext(cos, sin, [torch.empty(0), cache], backend.prepare(step))
    out = backend.forward(qkv, layer, context)
    return torch.cat((out.flatten(), cache.flatten()))


@pytest.mark.parametrize(
    "step",
    [
        batch((40, 1), (17, 1), (1, 1)),
        batch((40, 40), (33, 16)),
        batch((50, 1), (5, 1), (70, 3), (20, 20)),
        batch(*((290 + i, 1) for i in range(5, 0, -1)), num_shared=17),
    ],
    ids=["decodes", "chunks", "both", "shared prefix"],
)
@pytest.mark.parametrize("has_norms", [False, True])
def test_both_backends_agree(step: AttentionBatch, has_norms: bool) -> None:
    norms = (torch.rand(HEAD_DIM), torch.rand(HEAD_DIM)) if has_norms else (None, None)
    layer = AttentionLayer(1, HEADS, norms[0], norms[1], 1e-6)
    expected, out = (attend(backend, step, layer) for backend in backends())
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("block_size", [3, 12, 24, 48, 64])
def test_blocks_that_do_not_fill_a_tile_are_refused(block_size: int) -> None:
    with pytest.raises(SetupError, match=f"--block-size {block_size} .* power of two from 1 to 32") as caught:
        on_kernels(block_size=block_size)
    assert caught.value.code == "model_unavailable"


def test_blocks_that_are_taken_fill_every_tile() -> None:
    tiles = (*CHUNK_TILES.values(), *DECODE_TILES.values(), *SHARED_TILES.values())
    for block_size in (1, 2, 4, 8, 16, MAX_BLOCK_SIZE):
        on_kernels(block_size=block_size)
        assert all(each.block_n % block_size == 0 for each in tiles)


@pytest.mark.parametrize("head_dim", [129, 192, 256])
def test_heads_without_tiles_are_refused(head_dim: int) -> None:
    with pytest.raises(SetupError, match=f"heads of size {head_dim}.* up to 128: .*--device cpu") as caught:
        on_kernels(head_dim=head_dim)
    assert caught.value.code == "model_unavailable"


def test_heads_that_are_taken_have_tiles() -> None:
    for head_dim in (8, 16, 64, 72, 80, 96, MAX_HEAD_DIM):
        on_kernels(head_dim=head_dim)
        assert {(num_bytes, padded_head_dim(head_dim)) for num_bytes in (2, 4)} <= DECODE_TILES.keys()


@pytest.mark.parametrize(("heads", "kv_heads", "group"), [(17, 1, 17), (64, 2, 32)])
def test_more_heads_to_a_kv_head_than_rows_are_refused(heads: int, kv_heads: int, group: int) -> None:
    with pytest.raises(SetupError, match=f"{group} query heads to a KV head.* up to 16: .*--device cpu") as caught:
        on_kernels(heads=heads, kv_heads=kv_heads)
    assert caught.value.code == "model_unavailable"


def test_as_many_heads_to_a_kv_head_as_rows_agree() -> None:
    q, kv_cache = torch.randn(2, QUERY_ROWS, 16), torch.randn(4, 2, 1, BLOCK_SIZE, 16)
    tables, lengths = torch.tensor([[1, 2], [3, 0]], dtype=torch.int32), torch.tensor([30, 9], dtype=torch.int32)
    on_kernels(heads=QUERY_ROWS, kv_heads=1)
    found = paged_attention_decode(q, kv_cache, tables, lengths, 0.25, max_context_len=30)
    expected = reference.paged_attention_decode(q, kv_cache, tables, lengths, 0.25, max_context_len=30)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_blocks_are_shared_up_to_where_the_first_sequence_leaves_or_ends() -> None:
    tables = padded_tables([[1, 2, 3, 4, 5, 9], [1, 2, 3, 4, 5, 8, 11], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 7]])
    assert num_shared_blocks(tables, [640, 700, 321, 384], 64) == 5
    assert num_shared_blocks(tables, [640, 700, 320, 384], 64) == 4
    assert num_shared_blocks(tables[:3], [640, 700, 321], 64) == 0, "too few sequences to pay"
    assert num_shared_blocks(tables, [640, 700, 321, 384], 16) == 0, "too few tokens to pay"
    other = tables.copy()
    other[2, 4] = 6
    assert num_shared_blocks(other, [640, 700, 321, 384], 64) == 4
    other[2, 0] = 6
    assert num_shared_blocks(other, [640, 700, 321, 384], 64) == 0
