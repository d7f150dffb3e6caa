"""Paged attention of single queries on a CPU, compiled, against its twin in float64; what nobody owns is NaN."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from compiled_kernels import is_rounded_once, random_bfloats, torch_threads
from paged_cases import paged_case

from mmserve.kernels import reference
from mmserve.kernels.cpu_decode import paged_attention_decode

HEADS = [(1, 1), (4, 4), (4, 2), (8, 1), (9, 3), (14, 2)]
# Of weights that add up to 1, and of values about 1.
SLACK = 1e-5


class Decode:
    """Sequences in scrambled blocks, as the kernel takes them."""

    def __init__(
        self, context_lens: list[int], heads: tuple[int, int] = (4, 2), head_dim: int = 64, block_size: int = 16
    ) -> None:
        torch.manual_seed(0)
        num_heads, num_kv_heads = heads
        case = paged_case(
            context_lens, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size, dtype=torch.bfloat16
        )
        self.kv_cache, self.tables = case.kv_cache.cpu(), case.block_tables.cpu().long()
        self.lengths = case.context_lens.cpu().long()
        self.q = random_bfloats(len(context_lens), num_heads, head_dim)
        self.scale = head_dim**-0.5

    def run(self) -> torch.Tensor:
        return paged_attention_decode(self.q, self.kv_cache, self.tables, self.lengths, self.scale)

    def exact(self) -> torch.Tensor:
        wide = self.q.double(), self.kv_cache.double(), self.tables, self.lengths, self.scale
        return reference.paged_attention_decode(*wide, max_context_len=int(self.lengths.max()))

    def fill(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Of the first sequence, `[L, D]` each, the same in all heads."""
        block_size = self.kv_cache.shape[3]
        for position, pair in enumerate(zip(keys, values, strict=True)):
            block = int(self.tables[0, position // block_size])
            self.kv_cache[block, :, :, position % block_size] = torch.stack(pair)[:, None].bfloat16()


def around_blocks(block_size: int) -> list[int]:
    """Lengths of one sequence each: one, and those at the ends of blocks and of vectors."""
    lengths = {1, 15, 16, 17, 33, *(n * block_size + i for n in (1, 2, 5) for i in (-1, 0, 1))}
    return sorted(lengths - {0}, key=lambda length: length * 7919 % 101)


@pytest.mark.parametrize("heads", [(4, 2), (9, 3)], ids=str)
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
@pytest.mark.parametrize("block_size", [1, 8, 16])
def test_sequences_of_mixed_lengths(heads: tuple[int, int], head_dim: int, block_size: int) -> None:
    case = Decode(around_blocks(block_size), heads, head_dim, block_size)
    assert is_rounded_once(case.run(), case.exact(), SLACK)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("lengths", [[1], [16], [700], [700, 16, 1, 15, 17, 699]], ids=str)
def test_lengths(heads: tuple[int, int], lengths: list[int]) -> None:
    """One sequence with one head is less than there are threads."""
    case = Decode(lengths, heads)
    with torch_threads(3):
        assert is_rounded_once(case.run(), case.exact(), SLACK)


@pytest.mark.parametrize("lengths", [[1], [33], [700, 16, 1, 15, 17, 64, 63]], ids=str)
def test_threads_change_no_bit(lengths: list[int]) -> None:
    case, outs = Decode(lengths, (9, 3)), []
    for threads in (1, 2, 3):
        with torch_threads(threads):
            outs.append(case.run())
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert is_rounded_once(outs[0], case.exact(), SLACK)


def test_queries_inside_wider_rows() -> None:
    """As they lie in the product of a layer."""
    case = Decode([40, 3, 17])
    expected = case.run()
    case.q = torch.cat((case.q, torch.full((3, 4, 64), torch.nan).bfloat16()), dim=1)[:, :4]
    assert not case.q.is_contiguous()
    assert torch.equal(case.run(), expected)


def test_nothing_is_changed() -> None:
    case = Decode([40, 3])
    before = [tensor.clone() for tensor in (case.q, case.kv_cache, case.tables, case.lengths)]
    case.run()
    after = (case.q, case.kv_cache, case.tables, case.lengths)
    assert all(torch.equal(*(t.nan_to_num(7.0) for t in pair)) for pair in zip(before, after, strict=True))


@pytest.mark.parametrize("block_size", [1, 8, 16])
def test_nan_of_others_does_not_leak(block_size: int) -> None:
    """All that is not of the first sequence is NaN, in the tail of its last block as well."""
    case = Decode([19, 70, 5], block_size=block_size)
    expected, own = case.run()[0], case.tables[0, : -(-19 // block_size)]
    is_other = torch.ones(len(case.kv_cache), dtype=torch.bool)
    is_other[own] = False
    case.kv_cache[is_other] = torch.nan
    out = case.run()
    assert torch.equal(out[0], expected)
    assert bool(out[1:].isnan().all())


def test_nan_of_a_head_stays_in_its_group() -> None:
    case = Decode([19, 30], (6, 3))
    expected = case.run()
    case.kv_cache[case.tables[0, 0], 0, 1, 4, 7] = torch.nan
    out = case.run()
    assert bool(out[0, 2:4].isnan().all())
    out[0, 2:4] = expected[0, 2:4]
    assert torch.equal(out, expected)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("length", [1, 16, 37])
def test_large_scores_of_one_sign_do_not_overflow(sign: float, length: int) -> None:
    """All scores are 10,240 or all are -10,240, so that the values are averaged."""
    case = Decode([length])
    case.q.fill_(8.0)
    case.scale = 1.0
    values = random_bfloats(length, 64, seed=1)
    case.fill(torch.full((length, 64), 20.0 * sign), values)
    assert is_rounded_once(case.run(), values.double().mean(dim=0).expand(1, 4, 64), SLACK)


@pytest.mark.parametrize("best", [0, 15, 16, 36])
def test_scores_far_apart(best: int) -> None:
    """One is at 10,240, the others at -10,240."""
    case = Decode([37])
    case.q.fill_(8.0)
    case.scale = 1.0
    keys, values = torch.full((37, 64), -20.0), random_bfloats(37, 64, seed=1)
    keys[best] *= -1
    case.fill(keys, values)
    assert torch.equal(case.run(), values[best].expand(1, 4, 64))


def test_scores_that_rise_and_fall() -> None:
    case = Decode([300])
    case.q.fill_(8.0)
    case.scale = 1.0
    slopes = torch.linspace(-20.0, 20.0, 300).bfloat16().float()
    case.fill(slopes[torch.randperm(300)][:, None].expand(300, 64), random_bfloats(300, 64, seed=1))
    assert is_rounded_once(case.run(), case.exact(), 1e-3)


def test_the_scale_is_the_callers() -> None:
    case = Decode([50, 20])
    case.scale = 0.01
    assert is_rounded_once(case.run(), case.exact(), SLACK)
    out = case.run()
    case.q *= 0.5
    case.scale *= 2
    torch.testing.assert_close(case.run(), out, rtol=8e-3, atol=1e-5)


def test_sequences_may_share_blocks() -> None:
    case = Decode([40, 20])
    case.tables[1, 0] = case.tables[0, 0]
    assert is_rounded_once(case.run(), case.exact(), SLACK)


def test_tables_may_be_wider_than_any_context() -> None:
    case = Decode([20, 5])
    expected = case.run()
    case.tables = torch.cat((case.tables, torch.zeros(2, 40, dtype=torch.int64)), dim=1)
    assert torch.equal(case.run(), expected)


def test_an_empty_context_gives_zeros() -> None:
    case = Decode([20, 5])
    case.lengths[1] = 0
    out = case.run()
    assert is_rounded_once(out, case.exact(), SLACK)
    assert not bool(out[1].any())


def test_callers_at_the_same_time_do_not_meet() -> None:
    """Each has memory of its own for the scores."""
    cases = [Decode([90, 20]), Decode([700]), Decode([33] * 5)]
    expected = [case.run() for case in cases]

    def repeated(i: int) -> bool:
        return all(torch.equal(cases[i].run(), expected[i]) for _ in range(50))

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(repeated, range(3))) == [True, True, True]
