"""The comparison at published dimensions, which needs a GPU, on small models of the same structure."""

import pytest
import torch
from published_shapes import PUBLISHED, tiny
from real_dimensions import compare


@pytest.mark.parametrize("family", PUBLISHED)
def test_the_comparison_passes_and_its_faults_show(family: str) -> None:
    result = compare(tiny(PUBLISHED[family]), torch.float32, torch.device("cpu"))
    assert result["passed"], result
    assert min(result["cosine"].values()) > 0.9999
    assert max(result["cosine_of_a_fault"].values()) < 0.999
