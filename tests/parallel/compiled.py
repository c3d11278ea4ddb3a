"""Roles with compiled blocks and without: `compiled.py FILE`; pytest's hooks would be compiled too.

FILE gets the gradients of both, the velocities of both in bf16 with Inductor's kernels, and JSON beside it the graphs
of each training step and the bytes that autograd keeps.
"""

import json
import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from helpers import ALONE, LATENT_SHAPE, small_model
from safetensors.torch import save_file

from unified_trainer.basics.types import Condition
from unified_trainer.models.sparse_attention import SparseAttentionConfig
from unified_trainer.models.wan.causal import CausalWanModel
from unified_trainer.models.wan.causal_sparse import CausalSparseWanModel
from unified_trainer.models.wan.sparse import SparseWanModel
from unified_trainer.numerics.chunks import ChunkConfig
from unified_trainer.roles import blocks
from unified_trainer.roles.adapter import AdapterConfig
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.recompute import Recompute
from unified_trainer.roles.role import Frozen, RoleConfig, Trainable, TrainableConfig


class SavedBytes(dict):
    """The bytes of tensors that autograd keeps, by address."""

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self[tensor.data_ptr()] = tensor.nbytes
        return tensor

    def unpack(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


FRAMES, SIGMA = 5, torch.tensor([0.3, 0.9], dtype=torch.float64)
CASES = {
    "whole": "selective",
    "none": "none",
    "full": "full",
    "adapters": Recompute("selective", full=1),
    "causal": "selective",
    "rounded": "none",
    "sparse": "selective",
    "causal sparse": "selective",
}
EAGER = (
    "adapters",
    "causal",
    "causal sparse",
    "rounded",
)  # with the back end "eager": faster, and enough to count graphs
UPDATED = ("none", "full")  # in passes with gradient alone, for what they keep


def roles_of(case: str, compile: bool) -> tuple[Trainable, Frozen]:
    """Student and teacher: over one network with adapters, or over one each."""
    settings = {"recompute": CASES[case], "compile": compile}
    if case == "adapters":
        adapter = AdapterConfig(rank=2)
        backbone = Backbone(small_model(), ALONE, adapters={"student": adapter}, **settings)
        for i, (key, weight) in enumerate(backbone.weights("student").items()):
            if "lora_B" in key:
                weight.data.normal_(generator=torch.Generator().manual_seed(i))
        student = Trainable("student", backbone, TrainableConfig(adapter=adapter))
        return student, Frozen("teacher", backbone, RoleConfig())
    model = small_model()
    if case == "causal":
        model = CausalWanModel(model.network)
    elif "sparse" in case:
        kind = CausalSparseWanModel if "causal" in case else SparseWanModel
        model = kind(model.network, None, SparseAttentionConfig(share=0.5, tile=(2, 2, 2)), ALONE.device)
    half = case == "rounded"  # bf16 copies of the weights
    config = TrainableConfig(precision="bf16" if half else "fp32")
    student = Trainable("student", Backbone(model, ALONE, trained=True, half_passes=half, **settings), config)
    return student, Frozen("teacher", Backbone(small_model(1), ALONE, compile=compile), RoleConfig())


def loss_of(case: str, student: Trainable, x: torch.Tensor, cond: Condition) -> torch.Tensor:
    """Sample without gradient, and compute a loss with it."""
    if "causal" not in case:
        with torch.no_grad():
            if case not in UPDATED:
                student.velocity(x, SIGMA, cond)
        return student.velocity(x, SIGMA, cond).square().mean()
    loss = torch.zeros(())
    with student.running() as model:
        cache = model.open_cache(ChunkConfig(1))
        for i in range(FRAMES):
            chunk = x[:, :, i : i + 1]
            with torch.no_grad():
                model.velocity_cached(chunk, SIGMA, cond, cache)
            loss = loss + model.velocity_cached(chunk, SIGMA, cond, cache).square().mean()
            model.append(chunk, cond, cache)
    return loss


def main() -> None:
    torch.set_num_threads(1)
    for known in ("Already found a `peft_config`", "Mismatch dtype between input and weight"):
        warnings.filterwarnings("ignore", message=known)
    found, said = {}, {}
    for case in CASES:
        blocks.BACKEND = "eager" if case in EAGER else "aot_eager"
        draw = torch.Generator().manual_seed(0)
        x = torch.randn(2, LATENT_SHAPE[0], FRAMES, *LATENT_SHAPE[2:], generator=draw)
        cond = Condition({"text": torch.randn(2, 4, 32, generator=draw)})
        for compile in (False, True):
            (student, teacher), graphs, kept = roles_of(case, compile), [], SavedBytes()
            for step in range(2):
                inputs = x + step
                if case == "sparse":
                    student.backbones[""].model.share = 0.3 + 0.3 * step  # a rising share needs no new graph
                kept.clear()  # addresses are used again in the next step
                before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
                if case not in UPDATED:
                    teacher.velocity(inputs, SIGMA, cond)
                with torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack):
                    loss = loss_of(case, student, inputs, cond)
                student.network.zero_grad()
                student.backward(loss, last=True)
                graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"] - before)
            name = f"{case}/{'compiled' if compile else 'plain'}"
            found |= {f"{name}/{key}": p.grad for key, p in student.weights.items() if p.grad is not None}
            said[name] = {"graphs": graphs, "kept": sum(kept.values())}
    blocks.BACKEND = "inductor"
    for compile in (False, True):
        student, _ = roles_of("rounded", compile)
        with torch.no_grad():
            found[f"inductor/{'compiled' if compile else 'plain'}"] = student.velocity(x, SIGMA, cond).contiguous()
    save_file(found, sys.argv[1])
    Path(sys.argv[1]).with_suffix(".json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
