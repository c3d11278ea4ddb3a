"""Ranks share the encoding of prompts: each encodes a part of them and reads the rest."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import REPO, WAN, environment, tiny_codec
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))
import encoded

pytestmark = pytest.mark.ranks


def test_each_rank_encodes_its_share_and_all_have_the_same(tmp_path):
    command = [sys.executable, encoded.__file__, str(WAN), str(tmp_path)]
    done = subprocess.run(command, cwd=REPO, env=environment(), capture_output=True, text=True, timeout=300)
    assert (tmp_path / "1.json").is_file(), done.stderr
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [rank["asked"] for rank in ranks] == [encoded.PROMPTS[0::2], encoded.PROMPTS[1::2]]
    assert {rank["said"].partition(";")[0] for rank in ranks} == {
        "text encoder: 9 distinct prompts, 0 encoded before, 9 now, not in memory"
    }
    alone = tiny_codec().encode_text(encoded.PROMPTS).text
    for rank in range(2):
        assert torch.equal(load_file(tmp_path / f"{rank}.safetensors")["text"], alone)
