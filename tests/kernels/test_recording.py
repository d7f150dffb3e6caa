"""Calls of kernels made again: with new contents, by several threads, and only where they are all of the work."""

import gc
from collections.abc import Callable

import pytest
import torch
from compiled_kernels import random_bfloats, torch_threads

from mmserve.kernels import cpu_fused, few_rows
from mmserve.kernels.jit import Recording

SIZE = 64


def recorded(step: Callable[[], torch.Tensor]) -> tuple[Recording, torch.Tensor]:
    recording = Recording()
    with torch.inference_mode(), recording.record():
        out = step()
    return recording, out


def matrix(out_features: int, in_features: int) -> few_rows.PackedMatrix:
    generator = torch.Generator().manual_seed(out_features)
    numbers = torch.randint(0, 16, (out_features, in_features), dtype=torch.uint8, generator=generator)
    scales = torch.rand(out_features, in_features // 32, generator=generator) * 0.1
    return few_rows.pack(numbers, scales, -8 * scales, 4)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_recording_does_what_the_calls_did_for_new_contents(num_threads: int) -> None:
    weight, up, down = random_bfloats(SIZE), matrix(2 * 96, SIZE), matrix(SIZE, 96)
    x = random_bfloats(1, SIZE)

    def step() -> torch.Tensor:
        normed, total = cpu_fused.add_rms_norm(x, x, weight, 1e-5)
        return cpu_fused.add(few_rows.product(cpu_fused.silu_and_mul(few_rows.product(normed, up)), down), total)

    with torch_threads(num_threads):
        recording, out = recorded(step)
        assert recording.is_complete
        for seed in range(3):
            x.copy_(random_bfloats(1, SIZE, seed=seed))
            recording.replay(num_threads)
            replayed = out.clone()
            assert torch.equal(replayed, step())


def test_what_lies_between_the_calls_stays_in_memory() -> None:
    weight, x = random_bfloats(SIZE), random_bfloats(2, SIZE)
    recording, out = recorded(lambda: cpu_fused.rms_norm(cpu_fused.rms_norm(x, weight, 1e-5), weight, 1e-5))
    expected = out.clone()
    gc.collect()
    others = [torch.full((2, SIZE), torch.nan, dtype=torch.bfloat16) for _ in range(200)]
    recording.replay(1)
    assert torch.equal(out, expected)
    assert all(bool(other.isnan().all()) for other in others)


@pytest.mark.parametrize(
    ("step", "is_complete"),
    [
        (lambda x: cpu_fused.add(x, x).view(-1)[: SIZE // 2], True),
        (lambda x: cpu_fused.add(x, x).transpose(0, 1), True),
        (lambda x: cpu_fused.add(x, x) + 1, False),
        (lambda x: cpu_fused.add(x.clone(), x), False),
        (lambda x: cpu_fused.add(x.float(), x.float()), False),
        (lambda x: torch.cat((cpu_fused.add(x, x), x)), False),
        (lambda x: x.mul_(2), False),
    ],
)
def test_a_recording_is_complete_without_work_of_pytorch(
    step: Callable[[torch.Tensor], torch.Tensor], is_complete: bool
) -> None:
    x = random_bfloats(2, SIZE)
    recording, _ = recorded(lambda: step(x))
    assert recording.is_complete is is_complete


def test_nothing_is_recorded_after_a_failure() -> None:
    recording, x = Recording(), random_bfloats(1, SIZE)

    def fail() -> None:
        with recording.record():
            cpu_fused.add(x, x)
            raise ValueError("a step failed")

    with pytest.raises(ValueError, match="a step failed"):
        fail()
    num_calls = len(recording._calls)
    cpu_fused.add(x, x)
    assert len(recording._calls) == num_calls == 1
