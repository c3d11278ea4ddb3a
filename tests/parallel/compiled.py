"""Gradients of a role with compiled blocks and without: `compiled.py FILE`; pytest's hooks would be compiled too."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers import ALONE, LATENT_SHAPE, small_model
from safetensors.torch import save_file

from unified_trainer.models.wan.codec import WanCondition
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.role import Trainable, TrainableConfig

torch.set_num_threads(1)
found = {}
for name in ("plain", "compiled"):
    settings = {"activation_checkpointing": True, "compile": name == "compiled"}
    student = Trainable("student", Backbone(small_model(), ALONE, trained=True, **settings), TrainableConfig())
    draw = torch.Generator().manual_seed(0)
    x_t, text = torch.randn(2, *LATENT_SHAPE, generator=draw), torch.randn(2, 4, 32, generator=draw)
    velocity = student.velocity(x_t, torch.tensor([0.3, 0.9]), WanCondition(text))
    student.backward(velocity.square().mean(), last=True)
    found |= {f"{name}/{key}": p.grad for key, p in student.weights.items() if p.grad is not None}
found["graphs"] = torch.tensor(torch._dynamo.utils.counters["stats"]["unique_graphs"])
save_file(found, sys.argv[1])
