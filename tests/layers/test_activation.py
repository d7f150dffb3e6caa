import pytest
import torch
from transformers.activations import ACT2FN

from mmserve.errors import SetupError
from mmserve.layers.activation import activation


@pytest.mark.parametrize("name", ["gelu", "gelu_pytorch_tanh", "quick_gelu", "silu"])
def test_equals_transformers(name: str) -> None:
    x = torch.linspace(-6, 6, 101)
    torch.testing.assert_close(activation(name)(x), ACT2FN[name](x))


def test_an_unknown_one_is_named_with_those_there_are() -> None:
    with pytest.raises(SetupError, match=r"swish9.*quick_gelu"):
        activation("swish9")
