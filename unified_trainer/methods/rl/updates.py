"""The update loop of the methods that learn from rewards: several optimizer updates on the samples of one rollout."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from unified_trainer.methods.base import Loss
from unified_trainer.methods.rl.groups import Advantages
from unified_trainer.methods.rl.minibatches import Minibatch


@dataclass(frozen=True)
class MinibatchLoss:
    """The loss of one minibatch at one sampling step, its metrics and its messages."""

    value: Float[Tensor, ""]
    metrics: dict[str, float | Tensor] = field(default_factory=dict)
    messages: tuple[str, ...] = ()


LossAt = Callable[[Minibatch, int, bool], MinibatchLoss]  # minibatch, sampling step, whether it is the update's last


def update_losses(
    advantages: Advantages,
    steps: Sequence[int],
    start_update: Callable[[list[Minibatch]], LossAt],
    metrics: dict[str, float],
) -> Iterator[Loss]:
    """Yield the student's losses of all updates.

    `start_update` is called with an update's minibatches and returns the function that computes their losses. An update
    without samples is skipped; a training step that skips all of them still yields its metrics.
    """
    if not any(advantages.minibatches):
        yield Loss("student", torch.zeros((), requires_grad=True), False, metrics, advantages.messages)
    for minibatches in filter(None, advantages.minibatches):
        yield from role_losses("student", minibatches, steps, start_update(minibatches), metrics, advantages.messages)


def role_losses(
    role: str,
    minibatches: Sequence[Minibatch],
    steps: Sequence[int],
    loss_at: LossAt,
    metrics: dict[str, float],
    messages: tuple[str, ...] = (),
) -> Iterator[Loss]:
    """Yield a role's losses of one update: for each sampling step, for each minibatch, their mean over steps."""
    for s in steps:
        for minibatch in minibatches:
            last = s == steps[-1] and minibatch is minibatches[-1]
            loss = loss_at(minibatch, s, last)
            yield Loss(role, loss.value / len(steps), last, metrics | loss.metrics, (*messages, *loss.messages))
