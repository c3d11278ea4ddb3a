"""Every method's step and validation on a fake GPU, on networks of one block: devices, dtypes, what is read from it."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs the CUDA build of torch and a driver: make fake-cuda", allow_module_level=True)

from fake import CUDA, Kernels, Reading, fake_cuda

from unified_trainer.parallel.mesh import Mesh
from unified_trainer.run.registry import METHODS
from unified_trainer.run.settings.command_line import parse
from unified_trainer.tools.plan import rehearsal

LATENT_FRAMES = 21
# For gradient norms, metrics, scores, the values of states of dance_ppo, and the check of a run's first update.
READ_BY = {"roles/learner.py", "run/tracking/tracker.py", "rewards/reward.py", "methods/dance_ppo.py"}
READ_BY |= {"methods/rl/on_policy_check.py", "methods/rl/replay.py"}
LOADED_BY = "models/folder.py"  # whether weights are finite


@pytest.mark.parametrize("method", METHODS)
def test_a_step_stays_on_the_device(method, monkeypatch):
    """Attention is in bf16, updates are fused calls, and the program reads from the device where it must alone."""
    monkeypatch.setattr(rehearsal, "Mesh", lambda _: Mesh(CUDA))
    run = parse(["--recipe", "wan2.1-1.3b", "--method", method, "--parallel.replicate", "1"])
    paths = dict.fromkeys(rehearsal.paths_of(run).values())
    with fake_cuda(), Kernels() as seen, Reading() as reading:
        rehearsal.rehearse(run, LATENT_FRAMES, 1, paths, first=0, steps=1, shown_frames=LATENT_FRAMES, causal=True)
    assert seen.updates
    assert {dtype for _, *tensors in seen.attention for dtype, *_ in tensors[:3]} == {torch.bfloat16}
    assert set(reading.reads) - {LOADED_BY} <= READ_BY
