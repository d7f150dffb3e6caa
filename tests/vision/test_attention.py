"""What the vision towers attend with: every backend against all pairs, and which of them a device gets."""

import logging
import sys
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vision_driver import relative_error

from mmserve.config import VisionAttentionName
from mmserve.errors import SetupError
from mmserve.kernels import reference
from mmserve.kernels.cpu import varlen_attention
from mmserve.layers.linear import Linear
from mmserve.quantization.dense import DenseWeight
from mmserve.vision import attention_backends
from mmserve.vision.attention import PackedSelfAttention
from mmserve.vision.attention_backends import (
    AutoAttention,
    Remembered,
    TorchAttention,
    TritonAttention,
    XformersAttention,
    vision_attention,
)

LENGTHS = [[1], [7], [4, 4, 4], [5, 5, 2, 5, 1, 1, 9], [1, 2, 3]]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], scale: float) -> torch.Tensor:
    """Over all pairs in float64, with those of other sequences masked."""
    q, k, v = q.double(), k.double(), v.double()
    owners = torch.repeat_interleave(torch.arange(len(lengths), device=q.device), torch.tensor(lengths).to(q.device))
    scores = torch.einsum("ihd,jhd->hij", q, k) * scale
    scores = scores.masked_fill(owners[:, None] != owners, float("-inf"))
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_every_sequence_sees_all_of_itself_alone(lengths: list[int]) -> None:
    """Over views, as a fused product gives them."""
    q, k, v = torch.randn(sum(lengths), 6, 12).chunk(3, dim=1)
    found = varlen_attention(q, k, v, lengths, 0.3)
    assert relative_error(found.double(), naive(q, k, v, lengths, 0.3)) < 1e-5


@pytest.mark.parametrize("lengths", [[1], [63, 64], [65, 65, 3], [127, 128, 129], [200, 1]], ids=str)
def test_lengths_that_are_padded(lengths: list[int]) -> None:
    """In bfloat16 a CPU rounds lengths up: what is added is not seen."""
    q, k, v = torch.randn(sum(lengths), 6, 16).bfloat16().chunk(3, dim=1)
    found = varlen_attention(q, k, v, lengths, 0.3)
    assert found.shape == q.shape
    assert relative_error(found.double(), naive(q.float(), k.float(), v.float(), lengths, 0.3)) < 1e-2


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_the_kernel_by_lengths(lengths: list[int]) -> None:
    """In Triton's interpreter where there is no GPU."""
    device = CUDA if torch.cuda.is_available() else CPU
    q, k, v = torch.randn(sum(lengths), 6, 16, device=device).chunk(3, dim=1)
    found = TritonAttention(device).over(lengths)(q, k, v, 0.3)
    assert relative_error(found.double(), naive(q, k, v, lengths, 0.3)) < 1e-4


@pytest.mark.parametrize("long", [4, 2048], ids="long from {}".format)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_runs_of_one_length_and_long_sequences_one_by_one(
    lengths: list[int], long: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU computes them, on this device."""
    monkeypatch.setattr(attention_backends, "_LONG", long)
    backend = TorchAttention(CUDA)
    q, k, v = torch.randn(sum(lengths), 6, 12).chunk(3, dim=1)
    found = backend.over(lengths)(q, k, v, 0.3)
    assert relative_error(found.double(), naive(q, k, v, lengths, 0.3)) < 1e-5


def test_cudnn_is_for_long_lengths_that_come_often() -> None:
    backend = TorchAttention(CUDA)
    choices = [backend._choices(4000)[0].name for _ in range(20)]
    assert choices == ["FLASH_ATTENTION"] * 16 + ["CUDNN_ATTENTION"] * 4
    assert {backend._choices(100)[0].name for _ in range(20)} == {"FLASH_ATTENTION"}
    assert backend._choices(4001)[0].name == "FLASH_ATTENTION"


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_the_layer_without_rotary(lengths: list[int]) -> None:
    """Queries, keys and values stand one after the other, and each has its heads in order."""
    num_heads, size = 2, 12
    weights = [torch.randn(size, size) for _ in range(4)]
    qkv, out = Linear(DenseWeight(torch.cat(weights[:3]))), Linear(DenseWeight(weights[3]))
    layer = PackedSelfAttention(qkv, out, num_heads, reference)
    x = torch.randn(sum(lengths), size)
    q, k, v = ((x @ weight.T).view(-1, num_heads, size // num_heads) for weight in weights[:3])
    expected = naive(q, k, v, lengths, (size // num_heads) ** -0.5).flatten(1) @ weights[3].T.double()
    found = layer(x, vision_attention("auto", CPU).over(lengths))
    assert relative_error(found.double(), expected) < 1e-5


class FakeVarlen:
    """A module in the place of the kernel's."""

    @staticmethod
    def query_tile(lengths: tuple[int, ...]) -> int:
        return 64

    @staticmethod
    def query_tiles(lengths: tuple[int, ...], query_tile: int) -> torch.Tensor:
        return torch.zeros(len(lengths), 2, dtype=torch.int32)

    @staticmethod
    def varlen_attention(q: Any, k: Any, v: Any, starts: torch.Tensor, tiles: Any, scale: float, **_: Any) -> Any:
        return starts


@pytest.fixture
def varlen(monkeypatch: pytest.MonkeyPatch) -> None:
    import mmserve.kernels

    monkeypatch.setitem(sys.modules, "mmserve.kernels.varlen", FakeVarlen)
    monkeypatch.setattr(mmserve.kernels, "varlen", FakeVarlen, raising=False)


@pytest.mark.usefixtures("varlen")
@pytest.mark.parametrize(
    ("name", "device", "kind"),
    [
        ("auto", CPU, TorchAttention),
        ("torch", CPU, TorchAttention),
        ("torch", CUDA, TorchAttention),
        ("triton", CUDA, TritonAttention),
        ("auto", CUDA, AutoAttention),
    ],
)
def test_what_a_device_gets(name: VisionAttentionName, device: torch.device, kind: type) -> None:
    chosen = vision_attention(name, device)
    assert isinstance(chosen, Remembered)
    assert type(chosen.attention) is kind


@pytest.mark.parametrize("name", ["triton", "xformers"])
def test_a_cpu_has_no_kernels_of_a_gpu(name: VisionAttentionName) -> None:
    with pytest.raises(SetupError, match=f"--vision-attention {name} needs a GPU") as caught:
        vision_attention(name, CPU)
    assert (caught.value.code, caught.value.param) == ("model_unavailable", "vision_attention")


def test_xformers_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xformers", None)
    with pytest.raises(SetupError, match="pip install") as caught:
        vision_attention("xformers", CUDA)
    assert caught.value.code == "missing_dependency"


class FakeXformers:
    """A package that warns and logs when it is imported, as the real one does."""

    def __init__(self, attention: Callable[..., torch.Tensor]) -> None:
        self._attention = attention

    @property
    def ops(self) -> SimpleNamespace:
        warnings.warn("an old name", DeprecationWarning, stacklevel=1)
        logging.getLogger("xformers").warning("xFormers can't load C++/CUDA extensions.")
        return SimpleNamespace(memory_efficient_attention=self._attention)


def install_xformers(monkeypatch: pytest.MonkeyPatch, attention: Callable[..., torch.Tensor]) -> None:
    """Its mask is the lengths."""
    mask = SimpleNamespace(from_seqlens=lambda lengths, device: lengths)
    monkeypatch.setitem(sys.modules, "xformers", FakeXformers(attention))
    monkeypatch.setitem(sys.modules, "xformers.ops.fmha.attn_bias", SimpleNamespace(BlockDiagonalMask=mask))


def test_xformers_that_works(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def attention(q: Any, k: Any, v: Any, *, attn_bias: list[int], scale: float) -> torch.Tensor:
        return varlen_attention(q[0], k[0], v[0], attn_bias, scale)[None]

    install_xformers(monkeypatch, attention)
    q, k, v = torch.randn(7, 6, 16).chunk(3, dim=1)
    found = XformersAttention(CPU).over([5, 2])(q, k, v, 0.3)
    assert relative_error(found.double(), naive(q, k, v, [5, 2], 0.3)) < 1e-5
    assert caplog.text == ""
    logging.getLogger("xformers").warning("later")
    assert "later" in caplog.text, "only the import is quiet"


@pytest.mark.parametrize(
    "error",
    [
        NotImplementedError("No operator found for `forward` with inputs:\n  query: shape=(1, 3, 1, 64)"),
        RuntimeError("No operator found for `forward` with inputs"),
        OSError("No operator found for `forward` with inputs:\nlibcudart.so.12"),
        ModuleNotFoundError("No operator found for `forward` with inputs", name="mslk"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_xformers_whose_compiled_part_does_not_fit(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def attention(*_: Any, **__: Any) -> torch.Tensor:
        raise error

    install_xformers(monkeypatch, attention)
    with pytest.raises(SetupError, match="does not work with torch") as caught:
        XformersAttention(CPU)
    assert (caught.value.code, caught.value.param) == ("missing_dependency", "vision_attention")
    assert torch.__version__ in caught.value.message
    assert "(No operator found for `forward` with inputs);" in caught.value.message
    assert caplog.text == ""


@pytest.mark.usefixtures("varlen")
def test_windows_by_one_kernel_and_images_by_another() -> None:
    auto = AutoAttention(TritonAttention(CPU), TorchAttention(CPU))
    x = torch.randn(1025, 2, 8)
    assert auto.over([64, 48])(x, x, x, 1.0).tolist() == [0, 64, 112]
    assert auto.over([1025])(x, x, x, 1.0).shape == x.shape


def test_what_was_prepared_is_kept_for_a_while() -> None:
    attention = Remembered(TorchAttention(CPU))
    first = attention.over([1, 2])
    assert attention.over((1, 2)) is first
    for length in range(3, 40):
        attention.over([length])
    assert attention.over([1, 2]) is not first


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[64] * 9 + [48], [3000, 100, 3000], [577] * 4], ids=["windows", "images", "tiles"])
@pytest.mark.parametrize("name", ["auto", "torch", "triton"])
def test_backends_of_a_gpu_agree(name: VisionAttentionName, lengths: list[int]) -> None:
    assert gpu_error(vision_attention(name, CUDA), lengths) < 1e-2


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_xformers_agrees() -> None:
    """Where it works; elsewhere it is an error at the start."""
    if xformers_works():
        attention = vision_attention("xformers", CUDA)
        assert gpu_error(attention, [64] * 9 + [48]) < 1e-2
        assert gpu_error(attention, [3000, 100]) < 1e-2
    else:
        with pytest.raises(SetupError, match="--vision-attention xformers") as caught:
            vision_attention("xformers", CUDA)
        assert caught.value.code == "missing_dependency"


def xformers_works() -> bool:
    x = torch.zeros(1, 16, 1, 64, device="cuda", dtype=torch.bfloat16)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from xformers import ops
            from xformers.ops.fmha.attn_bias import BlockDiagonalMask

            mask = BlockDiagonalMask.from_seqlens([6, 10], device=CUDA)
            ops.memory_efficient_attention(x, x, x, attn_bias=mask)
    except (ImportError, OSError, RuntimeError):
        return False
    return True


def gpu_error(attention: attention_backends.VisionAttention, lengths: list[int]) -> float:
    """Of the last of many calls, when cuDNN has its turn."""
    qkv = torch.randn(sum(lengths), 12, 80, device="cuda", dtype=torch.bfloat16)
    q, k, v = qkv.chunk(3, dim=1)
    attend = attention.over(lengths)
    for _ in range(20):
        found = attend(q, k, v, 80**-0.5)
    return relative_error(found.double(), naive(q, k, v, lengths, 80**-0.5))
