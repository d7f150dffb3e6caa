"""The feed-forward part in a width that a GPU likes is the same."""

import pytest
import torch

from mmserve.vision import feed_forward
from mmserve.vision.feed_forward import FeedForwardNames, VitFeedForward, padded_width
from mmserve.weights.dummy import DummyCheckpoint, byte_level_tokenizer
from mmserve.weights.layer_loader import LayerLoader
from mmserve.weights.loader import WeightReader

NAMES = {"gated": FeedForwardNames(["gate", "up"], "down"), "plain": FeedForwardNames(["fc1"], "fc2")}


def layer(kind: str) -> VitFeedForward:
    """Weights depend on their names alone."""
    checkpoint = DummyCheckpoint({}, {}, byte_level_tokenizer, seed=1)
    loader = LayerLoader(WeightReader(checkpoint), torch.float32, torch.device("cpu"))
    return VitFeedForward(loader, NAMES[kind], 24, 50, "gelu_pytorch_tanh")


@pytest.mark.parametrize("kind", NAMES)
def test_padding_changes_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, narrow = torch.randn(9, 24), layer(kind)
    monkeypatch.setattr(feed_forward, "padded_width", lambda inner, device: 64)
    wide = layer(kind)
    assert wide._in(x).shape[1] == 64 * len(NAMES[kind].inward)
    assert narrow(x).abs().max() > 0
    torch.testing.assert_close(wide(x), narrow(x))


def test_only_a_gpu_wants_a_width_in_steps_of_64() -> None:
    assert padded_width(3420, torch.device("cpu")) == 3420
    assert [padded_width(width, torch.device("cuda")) for width in (3420, 5120, 1)] == [3456, 5120, 64]
