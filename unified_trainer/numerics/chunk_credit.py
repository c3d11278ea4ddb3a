"""Returns and advantages of the chunks of a causal student, discounted over later chunks."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unified_trainer.numerics.advantages import Estimator, group_advantages
from unified_trainer.numerics.kernels import Policy


def chunk_returns(rewards: Float[Tensor, "b k"], discount: float) -> Float[Tensor, "b k"]:
    """Return the return of every chunk: its reward plus `discount` times the return of the next chunk.

    G_i = sum over j >= i of discount^(j - i) r_j. A discount of 0 leaves a chunk its own reward; with 1 and a reward
    that is 0 but for the last chunk, every chunk has that reward. A clip of one chunk keeps its reward, bit for bit.
    """
    returns = rewards.clone()
    for i in reversed(range(rewards.shape[1] - 1)):
        returns[:, i] += discount * returns[:, i + 1]
    return returns


def chunk_advantages(
    returns: Float[Tensor, "b k"],
    prompt_ids: Int[Tensor, " b"],
    estimator: Estimator,
    branch_ids: Int[Tensor, " b"] | None = None,
    shared: int = 0,
) -> Float[Tensor, "b k"]:
    """Return the advantage of every chunk of every sample by its return; `group_advantages` has the estimators.

    Samples of one prompt are compared chunk by chunk. With branches, the samples of a branch are equal in the first
    `shared` chunks. Their later chunks, which continue equal videos, are compared within the branch alone. A shared
    chunk is one action with several outcomes: it has the mean return of its branch, which is compared with those of the
    prompt's other branches; with one branch its advantage is 0.
    """
    columns = []
    for i, values in enumerate(returns.unbind(1)):
        if branch_ids is None:
            columns.append(group_advantages(values, prompt_ids, estimator))
        elif i >= shared:
            columns.append(group_advantages(values, branch_ids, estimator))
        else:
            columns.append(_of_branches(values, prompt_ids, branch_ids, estimator))
    return torch.stack(columns, 1)


def _of_branches(
    values: Float[Tensor, " b"], prompt_ids: Int[Tensor, " b"], branch_ids: Int[Tensor, " b"], estimator: Estimator
) -> Float[Tensor, " b"]:
    """Return the advantage of each sample's branch by the mean value of its samples."""
    first = {branch: row for row, branch in reversed(list(enumerate(branch_ids.tolist())))}
    means = torch.stack([values[branch_ids == branch].mean() for branch in first])
    prompts = prompt_ids[list(first.values())]
    if len(prompts.unique()) == len(prompts):
        return torch.zeros_like(values)
    advantages = dict(zip(first, group_advantages(means, prompts, estimator), strict=True))
    return torch.stack([advantages[branch] for branch in branch_ids.tolist()])


def chunk_log_ratios(
    policy: Policy, x_next: Tensor, mean: Tensor, mean_old: Tensor, std: Tensor, ranges: list[tuple[int, int]]
) -> Float[Tensor, "b k"]:
    """Return log p(x_next) - log p_old(x_next) of each chunk of latent frames, averaged over the chunk's elements.

    `mean` keeps its graph. Weighted with the chunks' shares of the frames they sum to the log-ratio of the clip.
    """
    ratios = []
    for start, stop in ranges:
        x, now, old = (values[:, :, start:stop] for values in (x_next, mean, mean_old))
        ratios.append(policy.log_prob(x, now, std) - policy.log_prob(x, old, std))
    return torch.stack(ratios, 1)
