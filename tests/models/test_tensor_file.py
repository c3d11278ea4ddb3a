"""Written safetensors files: whoever may read a run may read them."""

import os
import stat
from functools import partialmethod

import pytest
import torch
from diffusers import ModelMixin
from helpers import ALONE, WAN
from safetensors.torch import load_file

from unified_trainer.models.tensor_file import write_tensors
from unified_trainer.models.wan.model import WanModel


@pytest.fixture(params=[0o022, 0o077, 0o002])
def mode(request):
    """The mode of a new file under the umask that this sets."""
    before = os.umask(request.param)
    yield 0o666 & ~request.param
    os.umask(before)


def modes(folder) -> set[int]:
    return {stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*") if path.is_file()}


def test_the_umask_decides_who_reads_tensors(tmp_path, mode):
    file = tmp_path / "a.safetensors"
    for value in (1.0, 2.0):  # the second time it is there
        write_tensors(file, {"a": torch.full((2,), value)}, {"about": "it"})
    assert load_file(file)["a"].tolist() == [2.0, 2.0]
    assert modes(tmp_path) == {mode}


def test_the_umask_decides_who_reads_a_network(tmp_path, mode, monkeypatch):
    model = WanModel.open(WAN, "transformer")
    model.read(ALONE)
    shards = partialmethod(ModelMixin.save_pretrained, max_shard_size="100KB")
    monkeypatch.setattr(type(model.network), "save_pretrained", shards)
    model.save(tmp_path, "transformer", torch.float32)
    assert len(list(tmp_path.rglob("*.safetensors"))) > 1
    assert modes(tmp_path) == {mode}
