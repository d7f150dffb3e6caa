"""Groups of options: into a command's signature, and back into objects."""

import inspect
from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from mmserve.commands.options import EngineOptions, SamplingOptions, with_option_groups
from mmserve.config import EngineConfig, VisionConfig
from mmserve.errors import RequestError
from mmserve.request import SamplingParams


@dataclass(frozen=True, kw_only=True)
class Colours:
    background: Annotated[str, typer.Option("--background", "-b")] = "white"
    text: str = "black"


def test_a_group_becomes_options_and_comes_back_as_an_object() -> None:
    seen: list[tuple[int, Colours]] = []

    @with_option_groups
    def paint(size: int, colours: Colours = Colours(text="blue")) -> None:
        """Paint."""
        seen.append((size, colours))

    assert list(inspect.signature(paint).parameters) == ["size", "background", "text"]
    assert paint.__doc__ == "Paint."
    app = typer.Typer()
    app.command()(paint)
    assert CliRunner().invoke(app, ["3", "-b", "red"]).exit_code == 0
    assert CliRunner().invoke(app, ["4"]).exit_code == 0
    assert seen == [(3, Colours(background="red", text="blue")), (4, Colours(text="blue"))]


def test_engine_options_of_nothing_are_the_engines_own_defaults() -> None:
    assert EngineOptions().to_config() == EngineConfig()


def test_engine_options_reach_the_configuration() -> None:
    config = EngineOptions(
        model="org/name",
        served_model_name=["a", "b"],
        dtype="float32",
        max_model_len=512,
        num_threads=2,
        kv_cache_memory_bytes="1.5GiB",
        enable_prefix_caching=False,
        max_num_seqs=3,
        engine_process=True,
        vision_attention="xformers",
        pixels_on="device",
    ).to_config()
    assert config.vision == VisionConfig(attention="xformers", pixels_on="device")
    assert (config.model, config.names, config.dtype) == ("org/name", ("a", "b"), "float32")
    assert (config.max_model_len, config.num_threads, config.use_process) == (512, 2, True)
    assert (config.cache.memory_bytes, config.cache.enable_prefix_caching) == (3 * 2**29, False)
    assert config.scheduler.max_num_seqs == 3


def test_wrong_values_name_their_option() -> None:
    with pytest.raises(RequestError, match="gpu-memory-utilization"):
        EngineOptions(gpu_memory_utilization=1.5).to_config()
    with pytest.raises(RequestError, match="not a size"):
        EngineOptions(kv_cache_memory_bytes="many").to_config()
    with pytest.raises(RequestError, match="temperature"):
        SamplingOptions(temperature=-1.0).to_params()


def test_sampling_options_of_nothing_are_the_requests_own_defaults() -> None:
    assert SamplingOptions().to_params() == SamplingParams()
    assert SamplingOptions(stop=["a"], top_k=5).to_params() == SamplingParams(stop=("a",), top_k=5)
