"""Greedy and random sampling on a GPU against their twins."""

import math

import pytest
import torch
from kernel_checks import DEVICE, randn

from mmserve.kernels import reference, sampling


def settings(num_rows: int, vocab_size: int, **values: float) -> list[torch.Tensor]:
    """temperature, top_k, top_p, min_p, uniform, the same in all rows; filters are off by default."""
    wanted = {"temperature": 1.0, "top_k": vocab_size, "top_p": 1.0, "min_p": 0.0, "uniform": 0.5} | values
    columns = [torch.full((num_rows,), value, device=DEVICE) for value in wanted.values()]
    columns[1] = columns[1].int()
    return [column.float() if i != 1 else column for i, column in enumerate(columns)]


def draw_at(logits: list[float], uniforms: list[float], **values: float) -> list[int]:
    rows = torch.tensor([logits] * len(uniforms), device=DEVICE)
    columns = settings(len(uniforms), len(logits), **values)
    columns[4] = torch.tensor(uniforms, device=DEVICE)
    drawn = sampling.sample(rows, *columns)
    assert torch.equal(drawn, reference.sample(rows, *columns))
    return [int(token_id) for token_id in drawn]


def mixed_settings(num_rows: int, vocab_size: int) -> list[torch.Tensor]:
    """Every combination of filters, and greedy rows among them."""
    temperature, top_k, top_p, min_p, uniform = settings(num_rows, vocab_size)
    row = torch.arange(num_rows, device=DEVICE)
    temperature.uniform_(0.2, 1.7)
    uniform.uniform_(0.0, 1.0)
    top_k.copy_(torch.where(row % 2 == 0, torch.randint_like(top_k, 1, vocab_size), top_k))
    top_p.copy_(torch.where(row % 4 < 2, torch.rand_like(top_p), top_p))
    min_p.copy_(torch.where(row % 8 < 4, 0.2 * torch.rand_like(min_p), min_p))
    temperature[-1] = 0.0
    return [temperature, top_k, top_p, min_p, uniform]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 1), (3, 50), (2, 9001)])
def test_argmax(dtype: torch.dtype, num_rows: int, vocab_size: int) -> None:
    logits = randn(num_rows, vocab_size + 7, dtype=dtype)[:, :vocab_size]
    chosen = sampling.argmax(logits)
    assert chosen.dtype == torch.int64
    assert torch.equal(chosen, reference.argmax(logits))


def test_argmax_takes_the_first_of_equals_and_copes_with_what_is_no_number() -> None:
    logits = torch.zeros(5, 5000, device=DEVICE)
    logits[0, [4999, 4100, 70]] = 1.0
    logits[1] = math.nan
    logits[2] = -math.inf
    logits[3, 4500:] = math.nan
    logits[4, 4200] = math.inf
    chosen = sampling.argmax(logits).tolist()
    assert chosen[0] == 70
    assert 0 <= chosen[1] < 5000
    assert 0 <= chosen[2] < 5000
    assert chosen[3:] == [0, 4200]


def test_nothing_to_sample() -> None:
    assert sampling.argmax(randn(0, 9)).shape == sampling.sample(randn(0, 9), *settings(0, 9)).shape == (0,)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that few logits take all the ways that many do."""
    monkeypatch.setattr(sampling, "_BLOCK", 64)
    monkeypatch.setattr(sampling, "_CANDIDATES", 32)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("vocab_size", [5, 64, 300])
def test_sample(vocab_size: int) -> None:
    logits = 3 * randn(17, vocab_size + 3)[:, 2:-1]
    columns = mixed_settings(17, vocab_size)
    assert torch.equal(sampling.sample(logits, *columns), reference.sample(logits, *columns))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sample_of_half_precision_has_ties(dtype: torch.dtype) -> None:
    logits = torch.randint(-4, 4, (9, 200), device=DEVICE).to(dtype)
    columns = mixed_settings(9, 200)
    assert torch.equal(sampling.sample(logits, *columns), reference.sample(logits, *columns))


GRID = [0.0, 0.05, 0.15, 0.3, 0.45, 0.65, 0.75, 1.0]
# In the order of ids, logarithms of 0.1, 0.4, 0.2, 0.3.
FOUR = [math.log(each) for each in (0.1, 0.4, 0.2, 0.3)]


def test_draws_follow_the_distribution() -> None:
    assert draw_at(FOUR, GRID) == [0, 0, 1, 1, 1, 2, 3, 3]


def test_temperature_flattens_or_sharpens() -> None:
    assert draw_at(FOUR, GRID, temperature=1e3) == [0, 0, 0, 1, 1, 2, 3, 3]
    assert set(draw_at(FOUR, GRID, temperature=0.01)) == {1}
    assert set(draw_at([1.0, 2.0, 2.0, 0.0], GRID, temperature=0.0)) == {1}


def test_only_what_the_filters_keep_is_drawn() -> None:
    assert set(draw_at(FOUR, GRID, top_k=2)) == {1, 3}
    assert set(draw_at(FOUR, GRID, top_k=1)) == {1}
    assert set(draw_at(FOUR, GRID, top_p=0.65)) == {1, 3}
    assert set(draw_at(FOUR, GRID, top_p=0.75)) == {1, 2, 3}
    assert set(draw_at(FOUR, GRID, top_p=0.0)) == {1}
    assert set(draw_at(FOUR, GRID, min_p=0.6)) == {1, 3}
    assert set(draw_at(FOUR, GRID, min_p=1.0)) == {1}


def test_top_p_is_a_share_of_what_top_k_left() -> None:
    assert set(draw_at(FOUR, GRID, top_k=3, top_p=0.5)) == {1, 3}
    assert set(draw_at(FOUR, GRID, top_k=2, top_p=0.5)) == {1}


def test_ties_at_a_threshold_are_all_kept() -> None:
    assert set(draw_at([0.0, 1.0, 1.0, 1.0, 2.0], GRID, top_k=2)) == {1, 2, 3, 4}
    assert set(draw_at([0.0, 0.0, 0.0, 0.0], GRID, top_p=0.1)) == {0, 1, 2, 3}


@pytest.mark.usefixtures("small_blocks")
def test_more_ties_than_there_is_room_for_candidates() -> None:
    logits = [0.0] * 100 + [3.0] * 40 + [5.0] + [-math.inf] * 20
    assert set(draw_at(logits, GRID, top_k=3)) <= set(range(100, 141))
    assert set(draw_at(logits, GRID, top_p=0.5)) <= set(range(100, 141))
    assert set(draw_at([1.0] * 99, GRID, top_k=3)) <= set(range(99))


def test_what_is_banned_is_never_drawn() -> None:
    assert set(draw_at([-math.inf, 0.0, -math.inf, 1.0, -math.inf], GRID)) == {1, 3}
    assert set(draw_at([-math.inf, 0.0, math.nan, 1.0, -math.inf], GRID, top_k=4, top_p=0.999)) == {1, 3}
    assert set(draw_at([-1e30, 0.0, -1e30, 1.0], GRID, top_k=2)) == {1, 3}


def test_a_row_without_numbers_does_not_disturb_its_neighbours() -> None:
    logits = torch.tensor([FOUR, [math.nan] * 4, [-math.inf] * 4, [0.0, math.inf, 0.0, 0.0], FOUR], device=DEVICE)
    for values in ({}, {"top_k": 2, "top_p": 0.9, "min_p": 0.1}, {"temperature": 0.0}):
        drawn = sampling.sample(logits, *settings(5, 4, uniform=0.4, **values)).tolist()
        assert drawn[0] == drawn[4] == 1
        assert drawn[3] == 1
        assert all(0 <= token_id < 4 for token_id in drawn)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 152064), (256, 152064), (100, 32000), (7, 49153)])
@pytest.mark.parametrize("spread", [0.1, 1.0, 5.0])
def test_sample_of_real_sizes(dtype: torch.dtype, num_rows: int, vocab_size: int, spread: float) -> None:
    """Sums in float32 may move a draw by one part in ten thousand of the distribution, and no further."""
    logits = (spread * randn(num_rows, vocab_size)).to(dtype)
    assert torch.equal(sampling.argmax(logits), reference.argmax(logits))
    columns = mixed_settings(num_rows, vocab_size)
    columns[1] = torch.where(torch.rand(num_rows, device=DEVICE) < 0.5, columns[1] // 3000 + 1, columns[1])
    drawn = sampling.sample(logits, *columns)
    temperature, top_k, top_p, min_p, uniform = columns
    least, most = (
        reference.sample(logits, temperature, top_k, top_p, min_p, (uniform + shift).clamp(0.0, 1.0))
        for shift in (-1e-4, 1e-4)
    )
    assert bool(((least <= drawn) & (drawn <= most)).all())
    kth = logits.float().sort(dim=-1, descending=True).values.gather(1, top_k.long()[:, None] - 1)
    assert bool((logits.float().gather(1, drawn[:, None]) >= kth).all())


@pytest.mark.gpu
def test_sampling_inside_a_graph() -> None:
    logits, columns = randn(4, 32000), mixed_settings(4, 32000)
    sampling.sample(logits, *columns)
    sampling.argmax(logits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn, chosen = sampling.sample(logits, *columns), sampling.argmax(logits)
    logits.copy_(randn(4, 32000))
    graph.replay()
    assert torch.equal(chosen, reference.argmax(logits))
    assert torch.equal(drawn, sampling.sample(logits, *columns))
