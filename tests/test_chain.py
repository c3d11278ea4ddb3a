"""One student through four methods: finetune, DMD2, self-forcing, DanceGRPO, each from the last one's checkpoint."""

import pytest
import torch
from helpers import assert_same, checkpoint_of, flags

from unified_trainer.__main__ import main
from unified_trainer.checkpoint import dcp as checkpoint

SHORT = {"steps": 2, "validate-every": 0, "validation.num-samples": 2, "student.ema-decay": 0.5}
PAIRS = {"algorithm.batch-size": 2, "algorithm.micro-batch": 2}
STILL = {"student.learning-rate": 0, "video.frames": 5, "video.height": 32, "video.width": 32}
GROUPS = {"algorithm.num-prompts": 2, "algorithm.num-samples": 2, "algorithm.prompts-per-update": 2}
STAGES = {
    "finetune": PAIRS | {"data.num-clips": 2, "student.learning-rate": 1e-3, "student.warmup-updates": 0},
    "dmd2": PAIRS | STILL | {"algorithm.student-every": 1, "sampler.num-steps": 3},
    "self_forcing": PAIRS | STILL | {"algorithm.student-every": 1, "sampler.chunks.chunk-frames": 1},
    "dance_grpo": GROUPS | STILL | {"algorithm.rollout-batch": 4, "algorithm.update-batch": 4},
}
CARRIED = {  # what each stage must say of where it starts
    "dmd2": ("student from ", "critic from its own path, the checkpoint has none", "trained for no particular sampler"),
    "self_forcing": ("student, critic from ", "trained for the sampler num_steps 3"),
    "dance_grpo": ("student from ", "critic of the checkpoint is not used", "trained for the sampler num_steps 3"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the stages, tested in turn, put their runs."""
    return tmp_path_factory.mktemp("chain")


def weights(folder, role: str) -> dict[str, torch.Tensor]:
    held = checkpoint_of(folder, 2)
    return {key: value for key, value in held.items() if key.startswith(f"{role}/weights/")}


@pytest.mark.parametrize("method", STAGES)
def test_a_stage_starts_where_the_last_one_ended(folder, method, capsys):
    """The student does not learn after finetune: its weights arrive at the end as they were. The sampler goes along."""
    order = list(STAGES)
    before = order[order.index(method) - 1] if method != order[0] else None
    words = flags({"method": method, "output": folder / method} | SHORT | STAGES[method])
    assert main([*words, *(["--init-from", str(folder / before)] if before else [])]) == 0
    out = capsys.readouterr().out
    metadata = checkpoint.find(folder / method)[1]
    if before is None:
        assert metadata["sampler"] is None
        return
    assert all(words in out for words in CARRIED[method])
    assert_same(weights(folder / method, "student"), weights(folder / "finetune", "student"))
    assert (metadata["sampler"]["num_steps"], metadata["sampler"]["guidance_scale"]) == (3, 1.0)
    assert metadata["sampler"]["chunks"]["chunk_frames"] == (0 if method == "dmd2" else 1)
    if method == "self_forcing":
        first, second = (weights(folder / name, "critic") for name in ("dmd2", "self_forcing"))
        assert first.keys() == second.keys()
        assert any(not torch.equal(first[key], second[key]) for key in first)  # it goes on learning
