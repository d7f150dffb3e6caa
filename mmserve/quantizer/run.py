"""A whole model, a layer at a time: what calibration shows of a layer, its quantized form, its outputs for the next."""

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from mmserve.config import ModelConfig
from mmserve.errors import RequestError, SetupError
from mmserve.quantization.registry import quantization_config as stored_quantization
from mmserve.quantizer.block import DecoderBlock, Rounding, Tensors, as_it_is
from mmserve.quantizer.inputs import LayerInputs, Stream, batches_of
from mmserve.quantizer.kept import Group, LayerHarm, choose_kept
from mmserve.quantizer.layer_quantizer import QuantizedLayer, form_of, input_rounding, quantize_layer
from mmserve.quantizer.output import (
    SHARD_BYTES,
    copy_side_files,
    kept_modules,
    quantization_config,
    write_json,
    write_shards,
)
from mmserve.quantizer.partial import PartialRun
from mmserve.quantizer.settings import QuantizeSettings
from mmserve.quantizer.states import HiddenStates
from mmserve.weights.checkpoint import Checkpoint

Progress = Callable[[int, int], None]
# Samples that the choice of what is kept looks at.
_NUM_SAMPLES_FOR_CHOICE = 16


@dataclass(frozen=True)
class QuantizedModel:
    """What has become of a model; sizes in bytes of its files of weights."""

    path: Path
    num_layers: int
    num_layers_resumed: int
    num_samples: int
    num_bytes: int


class ModelQuantizer:
    """Writes `checkpoint`, quantized, to the folder `out`.

    `samples` are token ids `[N, S]`, which some schemes need and all but `rtn` take; `source` is the folder whose
    tokenizer and settings are copied, None where the checkpoint's own are to be written.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        settings: QuantizeSettings,
        samples: torch.Tensor | None,
        out: Path,
        *,
        source: Path | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Raises `RequestError` for what cannot be done, `SetupError` for a model that is not served."""
        self._checkpoint = checkpoint
        self._settings = settings
        self._samples = samples if settings.takes_texts else None
        self._out = out
        self._source = source
        self._dtype = dtype
        self._device = device
        self._config = ModelConfig.from_hf(checkpoint.config, checkpoint.generation_config)
        self._layer_names = _names_by_layer(checkpoint, self._config.num_layers)
        _check(checkpoint.config, self._config, settings, self._samples)
        self._partial = PartialRun(out, self._identity())
        self._kept: Collection[Group] = ()

    def _identity(self) -> dict[str, Any]:
        digest = hashlib.sha256()
        digest.update(repr(sorted(self._checkpoint.config.items())).encode())
        # A matrix of each layer tells fine-tuned models apart.
        for names in self._layer_names:
            digest.update(self._checkpoint.tensor(names["self_attn.v_proj.weight"]).float().numpy().tobytes())
        if self._samples is not None:
            digest.update(self._samples.numpy().tobytes())
        return {"digest": digest.hexdigest(), "dtype": str(self._dtype), **asdict(self._settings)}

    @torch.no_grad()
    def run(self, on_progress: Progress = lambda _done, _all: None) -> QuantizedModel:
        """Layers that an interrupted run has finished are not done again. Raises `RequestError` while one goes on."""
        with self._partial.held():
            return self._run(on_progress)

    def _run(self, on_progress: Progress) -> QuantizedModel:
        num_layers, resumed = self._config.num_layers, self._partial.num_layers_done
        on_progress(resumed, num_layers)
        if resumed not in (0, num_layers) and self._samples is not None:
            for kind in self._kinds:
                self._partial.require_states(kind, resumed, (*self._samples.shape, self._config.hidden_size))
        self._kept = [(layer, group) for layer, group in self._partial.remembered("kept", self._choose_kept)]
        for index in range(resumed, num_layers):
            on_progress(index, num_layers)
            self._partial.keep_layer(index, self._quantize(index).stored)
            if index and self._samples is not None:
                for kind in self._kinds:
                    self._states(kind, index - 1).remove()
        on_progress(num_layers, num_layers)
        self._write()
        num_bytes = sum(path.stat().st_size for path in self._out.glob("*.safetensors"))
        num_samples = 0 if self._samples is None else len(self._samples)
        self._partial.remove()
        return QuantizedModel(self._out, num_layers, resumed, num_samples, num_bytes)

    def _quantize(self, index: int) -> QuantizedLayer:
        tensors = self._float_layer(index)
        if self._samples is None:
            return quantize_layer(tensors, None, self._config, self._settings, self._dtype)
        if index == 0:
            self._embed(self._samples)
        streams = [self._stream(kind, index, self._samples) for kind in self._kinds]
        inputs = LayerInputs(tensors, streams[0], streams[1] if len(streams) > 1 else None)
        layer = quantize_layer(
            tensors, inputs, self._config, self._settings, self._dtype, kept=self._kept_groups(index)
        )
        inputs.write_outputs(layer.computed)
        return layer

    def _float_layer(self, index: int) -> Tensors:
        """Raises `SetupError` for numbers that are not finite."""
        tensors = {}
        for inside, name in self._layer_names[index].items():
            tensors[inside] = self._checkpoint.tensor(name).to(self._device, torch.float32)
            if not bool(tensors[inside].isfinite().all()):
                raise SetupError("model_unavailable", f"{name} has numbers that are not finite: the model is damaged")
        return tensors

    def _choose_kept(self) -> list[Group]:
        """What stays as it is: with eight bits some groups of matrices, by what the texts show of their harm."""
        if self._samples is None or self._settings.is_grouped or self._settings.keep == 0.0:
            return []
        step = max(len(self._samples) // _NUM_SAMPLES_FOR_CHOICE, 1)
        samples = self._samples[::step][:_NUM_SAMPLES_FOR_CHOICE]
        block = self._block(samples.shape[1], as_it_is)
        form, rounding = form_of(self._settings, self._dtype), input_rounding(self._settings.scheme)
        x = self._checkpoint.tensor("model.embed_tokens.weight")[samples].float()
        found: dict[Group, float] = {}
        sizes: Mapping[str, int] = {}
        for index in range(self._config.num_layers):
            harm = LayerHarm(block, self._float_layer(index), form, rounding)
            x = torch.cat([harm.add(x[rows].to(self._device)).cpu() for rows in batches_of(*x.shape[:2])])
            found.update({(index, group): value for group, value in harm.by_group().items()})
            sizes = harm.sizes()
        return choose_kept(found, sizes, self._settings.keep)

    def _kept_groups(self, index: int) -> frozenset[str]:
        return frozenset(group for layer, group in self._kept if layer == index)

    @property
    def _kinds(self) -> tuple[str, ...]:
        """Whose hidden states are kept: the quantized model's, and beside it the float model's."""
        return ("states", "wanted") if self._settings.makes_up_for_drift else ("states",)

    def _embed(self, samples: torch.Tensor) -> None:
        embedding = self._checkpoint.tensor("model.embed_tokens.weight")
        for kind in self._kinds:
            states = self._states(kind, 0).tensor
            for i, ids in enumerate(samples):
                states[i] = embedding[ids].float()

    def _stream(self, kind: str, index: int, samples: torch.Tensor) -> Stream:
        config = self._config
        rounding = input_rounding(self._settings.scheme) if kind == "states" else as_it_is
        block = self._block(samples.shape[1], rounding, self._kept_groups(index))
        width = max(config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim)
        between = self._partial.states_between(kind, (*samples.shape, width))
        return Stream(block, self._states(kind, index), self._states(kind, index + 1), between, self._device)

    def _block(self, seq_len: int, rounding: Rounding, kept: Collection[str] = ()) -> DecoderBlock:
        dtype = _product_dtype(self._dtype, self._device)
        return DecoderBlock(self._config, seq_len, self._device, product_dtype=dtype, rounding=rounding, kept=kept)

    def _states(self, kind: str, index: int) -> HiddenStates:
        assert self._samples is not None
        return self._partial.states(kind, index, (*self._samples.shape, self._config.hidden_size))

    def _write(self) -> None:
        write_shards(self._tensors(), self._out, max_bytes=SHARD_BYTES)
        config = dict(self._checkpoint.config)
        config.pop("torch_dtype", None)
        config["dtype"] = str(self._dtype).removeprefix("torch.")
        if isinstance(config.get("text_config"), dict):
            config["text_config"] = {**config["text_config"], "dtype": config["dtype"]}
        has_vision = self._config.vision is not None
        config["quantization_config"] = quantization_config(
            self._settings, kept=kept_modules(self._kept), has_vision=has_vision
        )
        if self._source is not None:
            copy_side_files(self._source, self._out)
        else:
            self._checkpoint.tokenizer().save(self._out)
            ends = {key: config[key] for key in ("bos_token_id", "eos_token_id") if config.get(key) is not None}
            write_json(self._out / "generation_config.json", ends)
        # What makes the folder a model comes last.
        write_json(self._out / "config.json", config)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        in_layers = {name for names in self._layer_names for name in names.values()}
        for name in sorted(self._checkpoint.names() - in_layers):
            tensor = self._checkpoint.tensor(name)
            yield self._stored_name(name), tensor.to(self._dtype) if tensor.is_floating_point() else tensor
        for index, names in enumerate(self._layer_names):
            prefix = self._stored_name(names["input_layernorm.weight"]).removesuffix("input_layernorm.weight")
            for inside, tensor in self._partial.layer(index).items():
                yield prefix + inside, tensor

    def _stored_name(self, name: str) -> str:
        return self._checkpoint.stored_name(name)


def _product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """bfloat16 where the model will run in it and the device is fast at it; float16 might overflow."""
    is_fast = device.type == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if dtype is torch.bfloat16 and is_fast else torch.float32


def _names_by_layer(checkpoint: Checkpoint, num_layers: int) -> list[dict[str, str]]:
    """For each layer: the name inside it -> the checkpoint's."""
    layers: list[dict[str, str]] = [{} for _ in range(num_layers)]
    for name in sorted(checkpoint.names()):
        prefix, _, rest = name.partition("model.layers.")
        number, _, inside = rest.partition(".")
        if not prefix and number.isdecimal() and int(number) < num_layers and "rotary_emb" not in inside:
            layers[int(number)][inside] = name
    return layers


def _check(
    stored: Mapping[str, Any], config: ModelConfig, settings: QuantizeSettings, samples: torch.Tensor | None
) -> None:
    if stored_quantization(stored) is not None:
        raise RequestError(
            "invalid_request", "this model is quantized already: give the one in full precision", param="model"
        )
    sizes = {config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim}
    uneven = sorted(size for size in sizes if size % settings.group_size)
    if settings.is_grouped and uneven:
        raise RequestError(
            "invalid_request",
            f"--group-size {settings.group_size} does not divide this model's rows of {uneven[0]} weights: "
            "take a smaller one",
            param="group_size",
        )
    if samples is None:
        if settings.needs_texts:
            raise RequestError(
                "invalid_request", f"--scheme {settings.scheme} needs texts: give --calibration", param="calibration"
            )
    elif samples.shape[1] > config.max_context:
        raise RequestError(
            "invalid_request",
            f"--seq-len {samples.shape[1]} exceeds the model's context of {config.max_context} tokens",
            param="seq_len",
        )
