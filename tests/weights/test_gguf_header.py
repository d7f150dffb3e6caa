from contextlib import suppress
from pathlib import Path

import pytest
from gguf import GGUFReader
from reference_gguf import save_reference_gguf
from reference_models import save_reference_model

from mmserve.errors import SetupError
from mmserve.weights.gguf_header import read_header


@pytest.fixture(scope="module")
def gguf_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("header")
    save_reference_model("llama3", folder, num_hidden_layers=1)
    extra = {"x.flag": True, "x.float": 0.5, "x.words": ["a", "é", ""], "x.numbers": [1, 2, 3], "general.alignment": 64}
    return save_reference_gguf(folder, folder / "model.gguf", metadata=extra)


def test_header_agrees_with_the_gguf_package(gguf_path: Path) -> None:
    reference, header = GGUFReader(gguf_path), read_header(gguf_path)
    fields = {key: field for key, field in reference.fields.items() if not key.startswith("GGUF.")}
    assert header.metadata == {key: field.contents() for key, field in fields.items()}
    assert [
        (
            tensor.name,
            tensor.tensor_type.name,
            tuple(reversed(tensor.shape.tolist())),
            tensor.data_offset,
            tensor.n_bytes,
        )
        for tensor in reference.tensors
    ] == [(info.name, info.type, info.shape, info.offset, info.num_bytes) for info in header.tensors]


def test_a_cut_file_is_damaged_wherever_it_is_cut(gguf_path: Path, tmp_path: Path) -> None:
    content = gguf_path.read_bytes()
    for size in [5, 24, 100, 1000, 5000, len(content) // 2, len(content) - 1]:
        (tmp_path / "cut.gguf").write_bytes(content[:size])
        with pytest.raises(SetupError, match="damaged or cut short"):
            read_header(tmp_path / "cut.gguf")


@pytest.mark.parametrize("position", range(8, 400, 7))
def test_flipped_bytes_never_escape_as_another_error(gguf_path: Path, tmp_path: Path, position: int) -> None:
    content = bytearray(gguf_path.read_bytes())
    content[position] ^= 0xFF
    (tmp_path / "flipped.gguf").write_bytes(content)
    with suppress(SetupError):
        assert read_header(tmp_path / "flipped.gguf").metadata


@pytest.mark.parametrize("content", [b"", b"GGU", b"not a model at all"])
def test_other_files_are_not_gguf(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "other.gguf").write_bytes(content)
    with pytest.raises(SetupError, match="is not a GGUF file"):
        read_header(tmp_path / "other.gguf")
