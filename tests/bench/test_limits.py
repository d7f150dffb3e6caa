"""The limit against cases reckoned by hand, the published figures of a card, and a clock."""

from dataclasses import replace

import pytest

from mmserve.bench.ceilings import measure_ceilings
from mmserve.bench.limits import (
    Ceilings,
    DecoderCost,
    PromptShape,
    QwenTowerCost,
    Work,
    bytes_of,
    page_limit,
    parse_ceilings,
    text_limit,
)
from mmserve.bench.workloads import Workload, build_workload
from mmserve.config import ModelConfig, RopeConfig
from mmserve.vision.qwen_vit import QwenVitConfig
from mmserve.weights.shapes import SHAPES

# Hidden 4, two query heads and one of keys and values, each of 2, two layers: 4*4 + 4*4 (q, o) + 2*4*2 (k, v) = 48
# and 3*4*6 = 72 for each layer, 240 together; a head of 10*4 = 40; keys and values 2*2*2 = 8 numbers a token.
TINY = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=10,
    hidden_size=4,
    intermediate_size=6,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=2,
    rms_norm_eps=1e-6,
    rope=RopeConfig(),
    max_position_embeddings=100,
)
COST = DecoderCost(TINY)
# Hidden 4, patches of 3*1*2*2 = 12: 48 of the embedding; layers of 4*16 + 3*4*5 = 124, two of them: 296 together.
# The merger takes 2x2 patches: 16*16 + 16*7 = 368.
TOWER = QwenVitConfig(
    depth=2,
    hidden_size=4,
    intermediate_size=5,
    num_heads=2,
    out_hidden_size=7,
    patch_size=2,
    temporal_patch_size=1,
    activation="silu",
    gated=True,
)
H200 = Ceilings(789e12, 4.27e12)


def test_sizes_of_a_decoder() -> None:
    assert (COST.layer_weights, COST.head_weights, COST.cache_bytes) == (240, 40, 16)


def test_prompts_by_hand() -> None:
    # 3 tokens see 1 + 2 + 3 keys, and 4*2 operations for each in 2 heads and 2 layers.
    attention = 4 * 2 * 2 * 2 * 6
    assert COST.prompts([PromptShape(3)]) == Work(2 * 240 * 3 + 2 * 40 + attention, 280 * 2 + 3 * 16)
    # The fourth and the fifth token of a prompt whose first three are cached see 4 + 5 keys.
    assert COST.prompts([PromptShape(5, 3)]) == Work(2 * 240 * 2 + 2 * 40 + 32 * 9, 280 * 2 + 5 * 16)
    both = COST.prompts([PromptShape(5, 3), PromptShape(4, 3, num_shared=3)])
    assert both == Work(2 * 240 * 3 + 2 * 40 * 2 + 32 * 13, 280 * 2 + (5 + 1) * 16)


def test_a_decoding_step_by_hand() -> None:
    step = COST.decoding_step([PromptShape(3), PromptShape(7)], 2)
    assert step == Work(2 * 280 * 2 + 32 * (5 + 9), 280 * 2 + 16 * (5 + 9))
    shared = COST.decoding_step([PromptShape(3, 2), PromptShape(7, 2, num_shared=2)], 2)
    assert shared == Work(step.operations, step.bytes - 2 * 16)


def test_grouped_queries_and_precision_count() -> None:
    many = DecoderCost(replace(TINY, num_kv_heads=2), num_bytes=4)
    assert (many.layer_weights, many.cache_bytes) == (240 + 2 * 16, 2 * 2 * 2 * 2 * 4)
    assert (bytes_of("bfloat16"), bytes_of("float32")) == (2, 4)


def test_a_tower_by_hand() -> None:
    # 4 x 6 patches are 6 tokens; every patch sees 24 in both layers, and 4*4 operations for each.
    products = 2 * (296 * 24 + 368 * 6)
    assert QwenTowerCost(TOWER).pictures([(4, 6)]) == Work(products + 16 * 2 * 24 * 24, (296 + 368) * 2)
    two = QwenTowerCost(TOWER).pictures([(4, 6), (2, 2)])
    assert two == Work(2 * (296 * 28 + 368 * 7) + 16 * 2 * (24 * 24 + 4 * 4), (296 + 368) * 2)


def test_windows_bound_what_a_patch_sees() -> None:
    # Windows of 4 patches a side in the second layer: 4x4 and 4x2.
    windows = QwenTowerCost(replace(TOWER, window=2, full_layers=frozenset({0})))
    whole = QwenTowerCost(TOWER)
    fewer = 24 * 24 - (16 * 16 + 8 * 8)
    assert whole.pictures([(4, 6)]).operations - windows.pictures([(4, 6)]).operations == 16 * fewer


def test_mergers_of_inner_layers_count() -> None:
    deep = QwenTowerCost(replace(TOWER, deepstack_layers=(0, 1)))
    extra = deep.pictures([(2, 2)]).operations - QwenTowerCost(TOWER).pictures([(2, 2)]).operations
    assert extra == 2 * 2 * 368


def test_a_phase_takes_as_long_as_what_it_has_least_of() -> None:
    assert Work(100.0, 10.0).seconds(Ceilings(10.0, 10.0)) == 10.0
    assert Work(100.0, 10.0).seconds(Ceilings(1000.0, 10.0)) == 1.0


def test_phases_add_up() -> None:
    workload = Workload("W", ((1, 2, 3),), max_tokens=3)
    limit = text_limit(TINY, workload, Ceilings(1.0, 1e9))
    steps = [COST.decoding_step([PromptShape(3)], step).operations for step in (1, 2)]
    assert limit.prompt_seconds == COST.prompts([PromptShape(3)]).operations
    assert limit.decoding_seconds == sum(steps)
    report = limit.report(measured_seconds=2 * limit.seconds)
    assert (report["share_of_limit"], report["limit_seconds"]) == (0.5, limit.seconds)
    assert report["limit"]["operations"] == limit.work.operations


def test_one_after_the_other_takes_longer_than_together() -> None:
    memory_bound = Ceilings(1e9, 1.0)
    together = Workload("W", ((1, 2, 3), (4, 5, 6)), max_tokens=3)
    alone = Workload("W", ((1, 2, 3),), max_tokens=3)
    in_turn = text_limit(TINY, replace(together, concurrency=1), memory_bound).seconds
    assert in_turn == 2 * text_limit(TINY, alone, memory_bound).seconds
    assert text_limit(TINY, together, memory_bound).seconds < in_turn


def test_a_warm_prefix_is_read_once_and_not_computed() -> None:
    prefix = (9, 9)
    warm = Workload("W", ((*prefix, 1), (*prefix, 2)), max_tokens=1, warm_prefix=prefix)
    limit = text_limit(TINY, warm, Ceilings(1e9, 1.0))
    assert limit.seconds == 280 * 2 + 16 * (2 + 2)


@pytest.mark.parametrize(("name", "tokens_per_second"), [("T1", 11_900), ("T1-single", 318)])
def test_the_card_s_limit_is_the_known_one(name: str, tokens_per_second: float) -> None:
    """Reckoned apart: T1 about 91 to 93 requests a second, one stream 316 to 318 tokens a second."""
    workload = build_workload(name)
    limit = text_limit(ModelConfig.from_hf(SHAPES["llama-2-7b"].config), workload, H200)
    assert len(workload.prompts) * workload.max_tokens / limit.seconds == pytest.approx(tokens_per_second, rel=0.01)


def test_a_page_goes_through_the_tower_first() -> None:
    config = ModelConfig.from_hf(SHAPES["qwen2.5-vl-7b"].config)
    limit = page_limit(config, [(1, 126, 88)], [PromptShape(2831)], 1, H200)
    assert limit is not None
    # 632 million weights by 11,088 patches are 14 TFLOP, and 4 layers that see the whole page 2.5.
    assert limit.vision_seconds * H200.operations_per_second == pytest.approx(16.9e12, rel=0.03)
    assert limit.prompt_seconds == pytest.approx(0.0489, rel=0.01)
    assert limit.decoding_seconds == 0.0
    twice = page_limit(config, [(1, 126, 88)], [PromptShape(2831), PromptShape(2831, 2800, 2800)], 1, H200)
    assert twice is not None
    assert twice.vision_seconds == limit.vision_seconds
    assert twice.prompt_seconds < 1.05 * limit.prompt_seconds


@pytest.mark.parametrize("name", ["llama-2-7b", "llava-1.5-7b"])
def test_other_towers_have_no_limit(name: str) -> None:
    assert page_limit(ModelConfig.from_hf(SHAPES[name].config), [()], [PromptShape(600)], 1, H200) is None


def test_ceilings_are_read() -> None:
    assert parse_ceilings("789e12,4.27e12") == H200
    for text in ("", "1", "1,x", "0,1", "1,-1", "nan,1", "inf,1"):
        with pytest.raises(ValueError):
            parse_ceilings(text)


def test_ceilings_are_measured() -> None:
    ceilings = measure_ceilings("cpu", side=128, copy_bytes=2**20)
    assert 1e6 < ceilings.operations_per_second < 1e15
    assert 1e6 < ceilings.bytes_per_second < 1e14
