"""Adapters made elsewhere, on two ranks: the weights are those of one rank, bit for bit, however they are sharded."""

import sys
from pathlib import Path

import pytest
from adapter_files import factors, kohya
from helpers import ALONE, WAN, assert_same
from safetensors.torch import load_file

from unified_trainer.models.wan.model import WanModel

sys.path.insert(0, str(Path(__file__).parent))
import adapted_ranks
from launch import fork_ranks

pytestmark = pytest.mark.ranks


def test_sharded_weights_get_the_same_adapter(tmp_path):
    adapter = kohya(tmp_path / "adapter", factors(WanModel.open(WAN, "transformer").network), 2.0)
    fork_ranks(2, adapted_ranks.work, adapter, tmp_path)
    alone = adapted_ranks.tensors(adapter, ALONE)
    for name in adapted_ranks.MESHES:
        for rank in range(2):
            file = tmp_path / f"{name}-{rank}.safetensors"
            assert_same(load_file(file), alone)
