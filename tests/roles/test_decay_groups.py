"""Weight decay of matrices alone is torch's AdamW with two groups of parameters, wherever moments lie."""

import pytest
import torch
from helpers import ALONE, CPU, assert_same, small_model
from torch import nn

from unified_trainer.parallel.mesh import Mesh, ParallelConfig
from unified_trainer.roles.adapter import AdapterConfig
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.learner import Learner, LearnerConfig
from unified_trainer.roles.role import Trainable, TrainableConfig

SHAPES = {"norm.weight": (4,), "proj.weight": (4, 3), "proj.bias": (4,), "conv.weight": (2, 3, 1, 2, 2), "gate": ()}
CONFIG = LearnerConfig(learning_rate=0.1, weight_decay=0.5, weight_decay_on="matrices", max_grad_norm=0.0)


def weights() -> dict[str, nn.Parameter]:
    draw = torch.Generator().manual_seed(1)
    return {key: nn.Parameter(torch.randn(shape, generator=draw)) for key, shape in SHAPES.items()}


def update(all_weights: dict[str, nn.Parameter], number: int, learner: Learner | torch.optim.Optimizer) -> None:
    for i, weight in enumerate(all_weights.values()):
        weight.grad = None if number == 1 and i in (0, 2, 4) else (weight.detach() - number).sin()
    learner.step(1.0) if isinstance(learner, Learner) else learner.step()


@pytest.mark.parametrize("parallel", [ParallelConfig(), ParallelConfig(offload_optimizer=True)])
def test_biases_and_norms_do_not_decay(parallel):
    """In the second update no weight of one dimension has a gradient."""
    ours, theirs = weights(), weights()
    learner = Learner("student", ours, CONFIG, Mesh(CPU, config=parallel))
    groups = [[p for p in theirs.values() if (p.dim() > 1) == decays] for decays in (True, False)]
    given = [{"params": own, "weight_decay": decay} for own, decay in zip(groups, (0.5, 0.0), strict=True)]
    other = torch.optim.AdamW(given, lr=0.1)
    for number in range(3):
        update(ours, number, learner)
        update(theirs, number, other)
    assert_same(ours, theirs)
    assert len(learner.idle_in_passes) == 2 * len(SHAPES)


def test_a_state_fits_both_settings():
    """A checkpoint of a run that decayed all weights goes on with matrices alone: names and shapes are the same."""
    before, after = (Learner("student", weights(), config).state_dict() for config in (LearnerConfig(), CONFIG))
    assert {key: value.shape for key, value in before.items()} == {key: value.shape for key, value in after.items()}


@pytest.mark.parametrize("rank", [0, 2])
def test_a_role_decays_its_matrices(rank):
    """With a gradient of 0 a weight moves by its decay alone; all factors of an adapter are matrices."""
    config = TrainableConfig(
        learning_rate=0.1, weight_decay=0.5, weight_decay_on="matrices", adapter=AdapterConfig(rank=rank)
    )
    adapters = {"student": config.adapter} if rank else None
    role = Trainable("student", Backbone(small_model(), ALONE, trained=not rank, adapters=adapters), config)
    before = {key: p.detach().clone() for key, p in role.weights.items()}
    for p in role.weights.values():
        p.grad = torch.zeros_like(p)
    role.step()
    assert_same(role.weights, {key: p * (0.95 if p.dim() > 1 else 1.0) for key, p in before.items()})
    assert any(p.dim() == 1 for p in before.values()) == (rank == 0)
