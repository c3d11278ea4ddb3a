"""The rise of the share of tiles that a role's sparse attention leaves out."""

from functools import partial
from typing import Any, cast

from unified_trainer.models.base import SparseVideoModel
from unified_trainer.roles.learner import Learner
from unified_trainer.roles.role import Trainable


def raise_share(role: Trainable) -> None:
    """Set the share before every pass by the number of updates, which checkpoints hold: a resumed run goes on."""
    for expert, learner in role.learners.items():
        model = cast(SparseVideoModel, role.backbones[expert].model)
        model.network.register_forward_pre_hook(partial(_set_share, role, model, learner), prepend=True)


def _set_share(role: Trainable, model: SparseVideoModel, learner: Learner, *_: Any) -> None:
    model.share = role.config.sparse_attention.share_at(learner.updates)
