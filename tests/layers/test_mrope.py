"""Positions and rotary tables of three axes against transformers' own."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.config import ModelConfig, RopeConfig
from mmserve.errors import SetupError
from mmserve.layers.mrope import MultiAxisRotaryTable, PromptPositions, frequency_axes, has_multiple_axes
from mmserve.layers.rotary import RotaryTable
from mmserve.request import ImageSpan

HEAD_DIM = 16
CLASSES = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}
# Text before each image, and the image's grid; text after the last.
layouts = st.tuples(
    st.lists(st.tuples(st.integers(0, 6), st.tuples(st.integers(1, 7), st.integers(1, 7))), max_size=4),
    st.integers(1, 6),
)
Layout = tuple[list[tuple[int, tuple[int, int]]], int]


def spans_of(layout: Layout) -> tuple[list[ImageSpan], int]:
    """Image spans, and the length of the prompt."""
    spans: list[ImageSpan] = []
    token = 0
    for num_text, (rows, columns) in layout[0]:
        spans.append(ImageSpan(token + num_text, rows * columns, b"", (rows, columns)))
        token = spans[-1].end
    return spans, token + layout[1]


def reference_positions(family: str, spans: list[ImageSpan], num_tokens: int) -> tuple[torch.Tensor, int]:
    import transformers

    model_class = getattr(transformers, f"{CLASSES[family]}Model")
    model = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2)))
    model.config.vision_config.tokens_per_second = 2
    model.get_vision_position_ids = lambda *args, **more: model_class.get_vision_position_ids(model, *args, **more)
    types = torch.zeros(1, num_tokens, dtype=torch.int32)
    for span in spans:
        types[0, span.offset : span.end] = 1
    grids = torch.tensor([(1, 2 * span.grid[0], 2 * span.grid[1]) for span in spans if span.grid])
    positions, delta = model_class.get_rope_index(
        model,
        input_ids=torch.zeros(1, num_tokens, dtype=torch.int64),
        mm_token_type_ids=types,
        image_grid_thw=grids if spans else None,
    )
    return positions[:, 0], int(delta)


@pytest.mark.parametrize("family", CLASSES)
@settings(max_examples=60, deadline=None)
@given(layout=layouts)
def test_positions_equal_the_reference(family: str, layout: Layout) -> None:
    layout = ([(max(num_text, 1), grid) for num_text, grid in layout[0]], layout[1])
    spans, num_tokens = spans_of(layout)
    expected, delta = reference_positions(family, spans, num_tokens)
    found = PromptPositions(num_tokens, spans)
    assert torch.equal(torch.from_numpy(found.slice(0, num_tokens)), expected)
    answer = torch.arange(num_tokens, num_tokens + 3) + delta
    assert torch.equal(torch.from_numpy(found.slice(num_tokens, num_tokens + 3)), answer.expand(3, 3))


@given(layout=layouts, data=st.data())
def test_slices_are_pieces_of_the_whole(layout: Layout, data: st.DataObject) -> None:
    spans, num_tokens = spans_of(layout)
    positions = PromptPositions(num_tokens, spans)
    whole = positions.slice(0, num_tokens + 8)
    start = data.draw(st.integers(0, num_tokens + 7))
    stop = data.draw(st.integers(start + 1, num_tokens + 8))
    assert (positions.slice(start, stop) == whole[:, start:stop]).all()


@given(layout=layouts)
def test_no_position_exceeds_its_token(layout: Layout) -> None:
    """So that a table as long as the context serves."""
    spans, num_tokens = spans_of(layout)
    whole = PromptPositions(num_tokens, spans).slice(0, num_tokens + 8)
    assert whole.min() >= 0
    assert (whole.max(axis=0) < num_tokens + 8).all()


def test_images_without_text_between_them() -> None:
    """The reference takes neighbouring images for one; each has its own grid here."""
    spans = [ImageSpan(0, 2, b"", (1, 2)), ImageSpan(2, 2, b"", (2, 1))]
    found = PromptPositions(5, spans).slice(0, 6).tolist()
    assert found == [[0, 0, 2, 2, 4, 5], [0, 0, 2, 3, 4, 5], [0, 1, 2, 2, 4, 5]]


@pytest.mark.parametrize("family", CLASSES)
@pytest.mark.parametrize("scaling", ["default", "yarn"])
def test_cos_and_sin_equal_the_reference(family: str, scaling: str) -> None:
    rope = {"rope_theta": 5000.0, "mrope_section": [4, 2, 2] if family == "qwen3_vl" else [2, 3, 3]}
    if scaling == "yarn":
        rope |= {"factor": 4.0, "original_max_position_embeddings": 32}
    text = {"hidden_size": HEAD_DIM * 2, "num_attention_heads": 2, "head_dim": HEAD_DIM, "max_position_embeddings": 128}
    rotary = reference_rotary(family, {**text, "rope_parameters": {"rope_type": scaling, **rope}})
    positions = torch.randint(0, 128, (3, 50))
    cos, sin = rotary(torch.zeros(1), positions[:, None])
    config = ModelConfig.from_hf(vl_config(family, {**text, "rope_scaling": {"type": scaling, **rope}}))
    found_cos, found_sin = table_of(config.rope).at(positions)
    torch.testing.assert_close(found_cos[:, 0], cos[0], rtol=0, atol=2e-5)
    # Ours has the first half negated, as `apply_rotary` takes it.
    torch.testing.assert_close(found_sin[:, 0, HEAD_DIM // 2 :], sin[0, :, HEAD_DIM // 2 :], rtol=0, atol=2e-5)
    torch.testing.assert_close(found_sin[:, 0, : HEAD_DIM // 2], -sin[0, :, : HEAD_DIM // 2], rtol=0, atol=2e-5)


def reference_rotary(family: str, text: dict[str, Any]) -> Any:
    import transformers

    models = getattr(transformers.models, family)
    name = "Qwen3VLTextRotaryEmbedding" if family == "qwen3_vl" else f"{CLASSES[family]}RotaryEmbedding"
    config = getattr(transformers, f"{CLASSES[family]}TextConfig")(**text)
    return getattr(getattr(models, f"modeling_{family}"), name)(config)


def vl_config(family: str, text: dict[str, Any]) -> dict[str, Any]:
    sizes = {"vocab_size": 10, "intermediate_size": 8, "num_hidden_layers": 1, "model_type": f"{family}_text"}
    return {"model_type": family, "vision_config": {"depth": 1}, "text_config": {**sizes, **text}}


def table_of(rope: RopeConfig) -> MultiAxisRotaryTable:
    assert has_multiple_axes(rope)
    assert rope.scaling is not None
    table = RotaryTable(rope, head_dim=HEAD_DIM, max_positions=128, dtype=torch.float32, device=torch.device("cpu"))
    return MultiAxisRotaryTable(table, rope.scaling, HEAD_DIM, torch.device("cpu"))


@pytest.mark.parametrize(
    ("family", "theta", "sections", "interleaved"),
    [
        ("qwen2_vl", 1e6, (16, 24, 24), False),
        ("qwen2_5_vl", 1e6, (16, 24, 24), False),
        ("qwen3_vl", 5e5, (24, 20, 20), True),
    ],
)
def test_what_a_configuration_leaves_out(
    family: str, theta: float, sections: tuple[int, ...], interleaved: bool
) -> None:
    rope = ModelConfig.from_hf(vl_config(family, {"hidden_size": 256, "num_attention_heads": 2})).rope
    assert rope.theta == theta
    assert rope.scaling is not None
    assert rope.scaling["mrope_section"] == sections
    assert rope.scaling["mrope_interleaved"] is interleaved


def test_published_forms_of_the_sections() -> None:
    for kind in ("mrope", "default"):
        text = {"hidden_size": 256, "num_attention_heads": 2, "rope_theta": 7.0}
        rope = ModelConfig.from_hf(
            vl_config("qwen2_vl", {**text, "rope_scaling": {"type": kind, "mrope_section": [30, 17, 17]}})
        ).rope
        assert rope.theta == 7.0
        assert rope.scaling is not None
        assert rope.scaling["mrope_section"] == [30, 17, 17]


def test_axes_of_the_published_sections() -> None:
    assert frequency_axes(64, (16, 24, 24), interleaved=False) == [0] * 16 + [1] * 24 + [2] * 24
    assert frequency_axes(64, (24, 20, 20), interleaved=True) == [0, 1, 2] * 20 + [0] * 4


def test_sections_of_another_head_are_refused() -> None:
    with pytest.raises(SetupError, match="mrope_section"):
        frequency_axes(32, (16, 24, 24), interleaved=False)
