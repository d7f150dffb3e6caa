"""The same workload on transformers in a process of its own: bfloat16, static batches, greedy, no end of sequence."""

import contextlib
import multiprocessing
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from mmserve.bench.memory import MemoryWatcher
from mmserve.bench.report import Measurement, RequestRecord
from mmserve.bench.workloads import Prompt, Workload
from mmserve.config import EngineConfig
from mmserve.errors import EngineError
from mmserve.kernels.thread_waits import usual_waits
from mmserve.weights import hub
from mmserve.weights.checkpoint import open_checkpoint
from mmserve.weights.shapes import find_shape, is_shape


@dataclass(frozen=True)
class BaselineSettings:
    """What the process is started with; `path` is a folder with `config.json` or a GGUF file.

    Without a path, the model has random weights at the shape of `config`.
    """

    path: Path | None
    is_dummy: bool
    device: str
    num_threads: int | None
    max_batch: int
    config: Mapping[str, Any] = field(default_factory=dict)


class TransformersBaseline:
    """Holds the model between rounds. Use it in a `with` statement, which starts and ends its process.

    Raises `SetupError` for a model that cannot be found, `EngineError` for whatever goes wrong over there.
    """

    def __init__(self, config: EngineConfig) -> None:
        is_dummy = config.load_format == "dummy"
        device = ("cuda" if torch.cuda.is_available() else "cpu") if config.device == "auto" else config.device
        path, shape = None, {}
        if is_shape(config.model):
            shape = dict(find_shape(config.model).config)
        else:
            path = hub.resolve(config.model, with_weights=not is_dummy)
        settings = BaselineSettings(path, is_dummy, device, config.num_threads, config.scheduler.max_num_seqs, shape)
        context = multiprocessing.get_context("spawn")
        self._connection, self._other_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(self._other_end, settings), daemon=True)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def __enter__(self) -> "TransformersBaseline":
        with usual_waits():
            self._process.start()
        self._other_end.close()
        try:
            self._receive()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def measure(self, workload: Workload) -> Measurement:
        """One round."""
        # A process that is gone is found out by the next line, with its exit code.
        with contextlib.suppress(OSError):
            self._connection.send(workload)
        measurement = self._receive()
        assert isinstance(measurement, Measurement)
        return measurement

    def _receive(self) -> object:
        try:
            answer = self._connection.recv()
        except (EOFError, OSError):
            self._process.join()
            code = self._process.exitcode
            raise EngineError("engine_dead", f"the transformers process ended by itself (exit code {code})") from None
        if isinstance(answer, EngineError):
            raise answer
        return answer

    def _end(self) -> None:
        self._connection.close()
        self._process.terminate()
        self._process.join()


def _serve(connection: Connection, settings: BaselineSettings) -> None:
    """The other process: load, say None, then answer each workload with its measurement."""
    # Standard output belongs to the report.
    with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(EOFError, BrokenPipeError):
        try:
            batches = StaticBatches(settings)
            connection.send(None)
            while True:
                workload = connection.recv()
                connection.send(batches.measure(workload))
        except (EOFError, BrokenPipeError, KeyboardInterrupt):
            return
        except Exception as error:
            connection.send(EngineError("internal_error", f"transformers failed: {type(error).__name__}: {error}"))


class StaticBatches:
    """transformers' `generate` over batches that run to their end before the next begins."""

    def __init__(self, settings: BaselineSettings) -> None:
        if settings.num_threads:
            torch.set_num_threads(settings.num_threads)
        self._settings = settings
        self._model = _load(settings).eval().to(settings.device)
        # A model's own settings would come back where the call says None.
        self._model.generation_config.eos_token_id = None
        self._generate([(0,) * 32], 4)

    def measure(self, workload: Workload) -> Measurement:
        size = min(workload.width, self._settings.max_batch)
        prompts = workload.prompts
        batches = [prompts[start : start + size] for start in range(0, len(prompts), size)]
        records: list[RequestRecord] = []
        with MemoryWatcher() as memory:
            start = time.perf_counter()
            for batch in batches:
                offered = time.perf_counter() if workload.concurrency else start
                times = self._generate(batch, workload.max_tokens)
                records += [
                    RequestRecord(offered, times[0], times[-1], len(prompt), workload.max_tokens) for prompt in batch
                ]
        return Measurement(
            records=records,
            peak_memory_bytes=memory.peak_bytes,
            device=self._settings.device,
            dtype=str(self._model.dtype).removeprefix("torch."),
            threads=torch.get_num_threads(),
        )

    def _generate(self, prompts: Sequence[Prompt], max_tokens: int) -> list[float]:
        """When each step of one batch ended."""
        from transformers import StoppingCriteriaList

        width = max(map(len, prompts))
        padded = [(0,) * (width - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        step_times: list[float] = []

        def note_time(ids: torch.Tensor, _scores: Any, **_: Any) -> torch.Tensor:
            if ids.is_cuda:
                torch.cuda.synchronize(ids.device)
            step_times.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        output = self._model.generate(
            torch.tensor(padded, device=self._settings.device),
            attention_mask=torch.tensor(mask, device=self._settings.device),
            do_sample=False,
            max_new_tokens=max_tokens,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([note_time]),
        )
        if output.shape != (len(prompts), width + max_tokens):
            raise RuntimeError(f"generate gave {tuple(output.shape)}, not {max_tokens} tokens for each prompt")
        return step_times


def _load(settings: BaselineSettings) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if settings.path is not None and settings.path.is_file():
        return _load_gguf(str(settings.path))
    if settings.is_dummy:
        config = AutoConfig.from_pretrained(settings.path) if settings.path else AutoConfig.for_model(**settings.config)
        # Billions of random numbers take minutes on a CPU.
        with torch.device(settings.device):
            return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return AutoModelForCausalLM.from_pretrained(settings.path, dtype=torch.bfloat16)


def _load_gguf(path: str) -> Any:
    """Through our own reader, because that of transformers needs another package. The model is the same."""
    from transformers import AutoConfig, AutoModelForCausalLM

    checkpoint = open_checkpoint(path)
    config = AutoConfig.for_model(**checkpoint.config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name in checkpoint.names():
            model.get_parameter(name).copy_(checkpoint.tensor(name))
    return model
