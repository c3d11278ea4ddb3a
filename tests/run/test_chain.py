"""One student through finetune, DMD2, self-forcing and DanceGRPO, each initialised from the previous checkpoint."""

import pytest
import torch
from helpers import assert_same, checkpoint_of, flags

from unified_trainer.__main__ import main
from unified_trainer.run.checkpoint.manifest import find

pytestmark = pytest.mark.slow

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
INITIALISED = {  # parts of the line that says where a stage starts from
    "dmd2": ("student from ", "critic from its own path, the checkpoint has none", "trained for no particular sampler"),
    "self_forcing": ("student, critic from ", "trained for the sampler num_steps 3"),
    "dance_grpo": ("student from ", "critic of the checkpoint is not used", "trained for the sampler num_steps 3"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of the runs; stages are tested in order."""
    return tmp_path_factory.mktemp("chain")


def weights(folder, role: str) -> dict[str, torch.Tensor]:
    held = checkpoint_of(folder, 2)
    return {key: value for key, value in held.items() if key.startswith(f"{role}/weights/")}


@pytest.mark.parametrize("method", STAGES)
def test_a_stage_starts_where_the_previous_one_ended(folder, method, capsys):
    """After finetune the learning rate is 0, so the weights stay equal to the end; the sampler is handed on too."""
    order = list(STAGES)
    previous = order[order.index(method) - 1] if method != order[0] else None
    options = flags({"method": method, "output": folder / method} | SHORT | STAGES[method])
    assert main([*options, *(["--init-from", str(folder / previous)] if previous else [])]) == 0
    out = capsys.readouterr().out
    metadata = find(folder / method)[1]
    if previous is None:
        assert metadata["sampler"] is None
        return
    assert all(text in out for text in INITIALISED[method])
    assert_same(weights(folder / method, "student"), weights(folder / "finetune", "student"))
    assert (metadata["sampler"]["num_steps"], metadata["sampler"]["guidance_scale"]) == (3, 1.0)
    assert metadata["sampler"]["chunks"]["chunk_frames"] == (0 if method == "dmd2" else 1)
    if method == "self_forcing":
        first, second = (weights(folder / name, "critic") for name in ("dmd2", "self_forcing"))
        assert first.keys() == second.keys()
        assert any(not torch.equal(first[key], second[key]) for key in first)  # it is trained further
