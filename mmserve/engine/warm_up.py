"""Steps that are run before the first request, so that it does not pay for what is lazy or has to be compiled."""

from collections.abc import Iterator

from mmserve.config import SchedulerConfig
from mmserve.engine.scheduler import ScheduledBatch, advance
from mmserve.request import SamplingParams, Sequence

_GREEDY = SamplingParams(temperature=0.0)
_RANDOM = SamplingParams(top_p=0.9)
# What the kernels of a GPU are compiled for: short and long chunks, alone and beside decoding sequences, of which there
# are few or many, with and without a prefix that all of them share.
_CHUNK_LENGTHS = (16, 256)
_CONTEXT_LENGTHS = (100, 300)
# A matrix product of another number of rows may take a kernel that first has to be loaded (200 ms, cuBLAS on an H200).
_FEWEST_ROWS = 16

_Span = tuple[int, int]


def warm_up_batches(
    scheduler: SchedulerConfig, *, max_model_len: int, block_size: int, on_gpu: bool
) -> Iterator[ScheduledBatch]:
    """A prompt and a decoding step, which write to block 0 only; and what else a GPU compiles for."""
    longest = min(scheduler.max_num_batched_tokens, max_model_len - 1)
    short = min(longest, block_size)
    yield _batch([(0, short)], block_size)
    yield _batch([(short - 1, short)], block_size)
    if not on_gpu:
        return
    chunks = [(0, min(length, longest)) for length in _CHUNK_LENGTHS]
    yield from (_batch([chunk], block_size, _RANDOM) for chunk in chunks)
    most = scheduler.max_num_seqs - 1
    for context_len in (min(length, longest) for length in _CONTEXT_LENGTHS):
        for num_decodes in sorted({min(count, most) for count in (1, 4, most)} - {0}):
            yield _batch([(context_len - 1, context_len)] * num_decodes + chunks[:1], block_size)
    for num_rows in _row_counts(min(scheduler.max_num_batched_tokens, longest * scheduler.max_num_seqs)):
        whole, rest = divmod(num_rows, longest)
        yield _batch([(0, longest)] * whole + [(0, rest)] * (rest > 0), block_size)


def _row_counts(most: int) -> list[int]:
    """16, 24, 32, 48 and so on below `most`, and `most`."""
    counts, count = [], _FEWEST_ROWS
    while count < most:
        counts += [count, count * 3 // 2]
        count *= 2
    return [*(count for count in counts if count < most), most]


def _batch(spans: list[_Span], block_size: int, params: SamplingParams = _GREEDY) -> ScheduledBatch:
    """Sequences whose tokens `start` to `end` are run; they all lie in the same blocks."""
    scheduled = []
    for i, (start, end) in enumerate(spans):
        block_ids = list(range(-(-end // block_size)))
        sequence = Sequence(f"warm-up-{i}", [0] * end, params, block_ids=block_ids, num_computed_tokens=start)
        scheduled.append(advance(sequence, end - start))
    return ScheduledBatch(tuple(scheduled))
