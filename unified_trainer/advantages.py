"""From rewards to advantages: what a sample is worth against the others of its prompt."""

from collections.abc import Hashable, Sequence
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

Estimator = Literal["grpo"]
EPS = 1e-8  # added to a group's standard deviation


def group_advantages(
    rewards: Float[Tensor, " b"], prompt_ids: Sequence[Hashable] | Tensor, estimator: Estimator = "grpo"
) -> Float[Tensor, " b"]:
    """Advantage of each sample in the group of its prompt id, whatever the order of the samples.

    `grpo`: (r - mean) / (std + eps), Bessel's std (arXiv:2402.03300). A group whose rewards are all equal gets 0.
    Raises ValueError for a group of one.
    """
    if estimator not in get_args(Estimator):
        raise ValueError(f"unknown advantage estimator {estimator!r}; have {', '.join(get_args(Estimator))}")
    advantages = torch.zeros_like(rewards, dtype=torch.float64)
    for prompt_id, index in groups(rewards, prompt_ids).items():
        if len(index) < 2:
            raise ValueError(f"prompt {prompt_id!r} has a group of one sample: an advantage needs at least two")
        r = rewards[index].double()
        if r.max() > r.min():
            advantages[index] = (r - r.mean()) / (r.std() + EPS)
    return advantages.to(rewards.dtype)


def below_threshold(rewards: Float[Tensor, " b"], prompt_ids: Sequence[Hashable] | Tensor, threshold: float) -> Tensor:
    """Samples of the groups whose mean reward is strictly below the threshold."""
    below = torch.zeros_like(rewards, dtype=torch.bool)
    for index in groups(rewards, prompt_ids).values():
        below[index] = rewards[index].double().mean() < threshold
    return below


def groups(rewards: Tensor, prompt_ids: Sequence[Hashable] | Tensor) -> dict[Hashable, Tensor]:
    """Positions of each prompt id's samples."""
    ids = prompt_ids.tolist() if isinstance(prompt_ids, Tensor) else list(prompt_ids)
    if len(ids) != len(rewards):
        raise ValueError(f"{len(rewards)} rewards but {len(ids)} prompt ids")
    positions: dict[Hashable, list[int]] = {}
    for position, prompt_id in enumerate(ids):
        positions.setdefault(prompt_id, []).append(position)
    return {key: torch.tensor(index, device=rewards.device) for key, index in positions.items()}
