"""Students with a condition image or joint attention, compiled or with shared tokens, have one rank's gradients."""

import sys
from pathlib import Path

import pytest
import torch
from forked import program
from helpers import ALONE, assert_near
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))
import image_ranks
from test_meshes import below

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    image_ranks.folders(root)
    return root


@pytest.fixture(scope="module")
def two(root):
    """What two ranks wrote."""
    done = program(image_ranks.__file__, root, ranks=2)
    assert (root / "tensors.safetensors").is_file(), done.stderr
    return load_file(root / "tensors.safetensors")


@pytest.fixture(scope="module")
def one(root):
    return {kind: image_ranks.found(root / kind, ALONE) for kind in image_ranks.KINDS}


def assert_equal(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], first: str) -> None:
    torch.testing.assert_close(ours["velocity"], expected["velocity"], rtol=0, atol=1e-5)
    torch.testing.assert_close(ours["features"], expected["features"], rtol=0, atol=1e-5)
    gradients = below(expected, "gradients/")
    assert any(bool(value.any()) for name, value in gradients.items() if first in name)
    assert_near(below(ours, "gradients/"), gradients, 1e-5)


@pytest.mark.parametrize(
    ("kind", "case"), [(name, case) for name, kind in image_ranks.KINDS.items() for case in kind.cases]
)
def test_a_student_with_images_has_the_gradients_of_eager_on_one_rank(one, two, kind, case):
    assert_equal(below(two, f"{kind}/{case}/"), one[kind], image_ranks.KINDS[kind].first)
