"""Adapters made elsewhere, on two ranks: the weights are those of one rank, bit for bit, however they are sharded."""

import subprocess
import sys
from pathlib import Path

import pytest
from adapter_files import factors, kohya
from helpers import ALONE, REPO, WAN, assert_same, environment
from safetensors.torch import load_file

from unified_trainer.models.wan.model import WanModel

sys.path.insert(0, str(Path(__file__).parent))
import adapted_ranks

pytestmark = pytest.mark.ranks


def test_sharded_weights_get_the_same_adapter(tmp_path):
    adapter = kohya(tmp_path / "adapter", factors(WanModel.open(WAN, "transformer").network), 2.0)
    command = [sys.executable, adapted_ranks.__file__, str(adapter), str(tmp_path)]
    done = subprocess.run(command, cwd=REPO, env=environment(), capture_output=True, text=True, timeout=300)
    alone = adapted_ranks.tensors(adapter, ALONE)
    for name in adapted_ranks.MESHES:
        for rank in range(2):
            file = tmp_path / f"{name}-{rank}.safetensors"
            assert file.is_file(), done.stderr
            assert_same(load_file(file), alone)
