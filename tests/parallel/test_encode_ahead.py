"""Ranks share the encoding of prompts: each encodes a part of them and reads the rest."""

import json
import sys
from pathlib import Path

import pytest
import torch
from helpers import WAN, tiny_codec
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))
import encoded
from launch import fork_ranks

pytestmark = pytest.mark.ranks


def test_each_rank_encodes_its_share_and_all_have_the_same(tmp_path):
    fork_ranks(2, encoded.work, WAN, tmp_path)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [rank["asked"] for rank in ranks] == [encoded.PROMPTS[0::2], encoded.PROMPTS[1::2]]
    assert {rank["said"].partition(";")[0] for rank in ranks} == {
        "text encoder: 9 distinct prompts, 0 encoded before, 9 now, not in memory"
    }
    alone = tiny_codec().encode_text(encoded.PROMPTS)["text"]
    for rank in range(2):
        assert torch.equal(load_file(tmp_path / f"{rank}.safetensors")["text"], alone)
