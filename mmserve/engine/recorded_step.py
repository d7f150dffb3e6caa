"""A decoding step of one sequence on a CPU, recorded: one call instead of hundreds, which Python would limit."""

import torch

from mmserve.attention.compiled_backend import decode_metadata
from mmserve.attention.context import ForwardContext
from mmserve.engine.step_inputs import StepInputs
from mmserve.kernels.jit import Recording
from mmserve.layers.mrope import MultiAxisRotaryTable
from mmserve.layers.rotary import RotaryTable
from mmserve.models.registry import LanguageModel


class RecordedStep:
    """What the model's kernels did for one token, done again for others.

    A model with layers that PyTorch computes cannot be recorded: `is_complete` says so. Its output layer may be
    PyTorch's.
    """

    def __init__(
        self,
        model: LanguageModel,
        rotary: RotaryTable | MultiAxisRotaryTable,
        kv_caches: list[torch.Tensor],
        *,
        max_model_len: int,
        block_size: int,
        num_axes: int,
    ) -> None:
        """Writes to the first block of the cache."""
        self._model = model
        self._rotary = rotary
        self._block_size = block_size
        self._num_threads = torch.get_num_threads()
        self._slot = torch.zeros(1, dtype=torch.int64)
        self._context_len = torch.ones(1, dtype=torch.int64)
        self._table = torch.zeros(1, -(-max_model_len // block_size), dtype=torch.int64)
        positions = torch.zeros((num_axes, 1) if num_axes > 1 else 1, dtype=torch.int64)
        self._embedded = model.embed(torch.zeros(1, dtype=torch.int64)).clone()
        self._cos, self._sin = (x.clone() for x in rotary.at(positions))
        metadata = decode_metadata(self._slot, self._table, self._context_len)
        context = ForwardContext(self._cos, self._sin, kv_caches, metadata)
        self._layers, self._head = Recording(), Recording()
        with self._layers.record():
            self._hidden = model.forward(self._embedded, context)
        with self._head.record():
            self._logits = model.logits(self._hidden)

    @property
    def is_complete(self) -> bool:
        return self._layers.is_complete

    def takes(self, inputs: StepInputs) -> bool:
        """One sequence whose token is known, for the threads that it was recorded for."""
        is_single = inputs.is_decode and len(inputs.rows) == 1 and inputs.sources is None
        return is_single and torch.get_num_threads() == self._num_threads

    def replay(self, inputs: StepInputs) -> tuple[torch.Tensor, None]:
        """Logits `[1, vocab]`, valid until the next call."""
        attention = inputs.attention
        self._embedded.copy_(self._model.embed(torch.from_numpy(inputs.token_ids)))
        for held, new in zip((self._cos, self._sin), self._rotary.at(torch.from_numpy(inputs.positions)), strict=True):
            held.copy_(new)
        table = attention.block_tables[0]
        self._table.numpy()[0, : len(table)] = table
        self._slot.numpy()[:] = attention.slots(self._block_size)
        self._context_len.numpy()[:] = attention.context_lens
        self._layers.replay(self._num_threads)
        if not self._head.is_complete:
            return self._model.logits(self._hidden), None
        self._head.replay(self._num_threads)
        return self._logits, None
