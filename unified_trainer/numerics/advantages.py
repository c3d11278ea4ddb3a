"""From rewards to advantages: what a sample is worth against the others of its prompt."""

from collections.abc import Hashable, Sequence
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Estimator = Literal["grpo", "dr_grpo", "rloo", "global", "global_std", "gdpo"]
Ids = Sequence[Hashable] | Tensor
EPS = 1e-8  # added to a standard deviation
GLOBAL_STD_EPS = 1e-4  # the same for global_std


def group_advantages(
    rewards: Float[Tensor, " b"] | Float[Tensor, "b r"],
    prompt_ids: Ids,
    estimator: Estimator = "grpo",
    *,
    weights: Sequence[float] | None = None,
) -> Float[Tensor, " b"]:
    """Advantage of each sample in the group of its prompt id, whatever the order of the samples.

    A std is Bessel's. `mean` and `std` are the group's, `all` those of the whole batch.
    `grpo`: (r - mean) / (std + eps) (arXiv:2402.03300). `dr_grpo`: r - mean (arXiv:2503.20783).
    `rloo`: r minus the mean of the others, n / (n - 1) (r - mean) (arXiv:2402.14740).
    `global`: (r - mean of all) / (std of all + eps). `global_std`: (r - mean) / (std of all + 1e-4).
    `gdpo`: several rewards [b, r]: the weighted sum of their grpo advantages, then as `global` (arXiv:2601.05242).
    A group of equal rewards gets exactly 0, but for `global`. Raises ValueError for a group of one.
    """
    if estimator not in get_args(Estimator):
        raise ValueError(f"unknown advantage estimator {estimator!r}; have {', '.join(get_args(Estimator))}")
    if rewards.ndim == 2 and estimator != "gdpo":
        raise ValueError(f"{estimator} takes one reward of each sample, not {rewards.shape[1]}; gdpo takes several")
    positions = groups(rewards, prompt_ids)
    for prompt_id, index in positions.items():
        if len(index) < 2:
            raise ValueError(f"prompt {prompt_id!r} has a group of one sample: an advantage needs at least two")
    r = rewards.double()
    if estimator == "gdpo":
        advantages = _standardised(_weighted(r, prompt_ids, weights))
    elif estimator == "global":
        advantages = _standardised(r)
    else:
        centred = torch.zeros_like(r)
        scale = torch.ones_like(r)
        for index in positions.values():
            mine = r[index]
            if mine.max() > mine.min():
                centred[index] = mine - mine.mean()
            if estimator == "grpo":
                scale[index] = mine.std() + EPS
            if estimator == "rloo":
                scale[index] = (len(index) - 1) / len(index)
        if estimator == "global_std":
            scale = global_statistics(*totals(r - r[0]))[1] + GLOBAL_STD_EPS
        advantages = centred / scale
    return advantages.to(rewards.dtype)


def totals(values: Float[Tensor, " b"]) -> Float[Tensor, "3"]:
    """Sum, sum of squares and count: what ranks add up to agree on statistics of all their samples."""
    values = values.double()
    return torch.stack([values.sum(), values.square().sum(), torch.tensor(len(values)).to(values)])


def global_statistics(total: Tensor | float, squares: Tensor | float, count: Tensor | float) -> tuple[Tensor, Tensor]:
    """Mean and Bessel's std from added-up totals: equal to those of all samples in one place."""
    total, squares, count = (torch.as_tensor(value, dtype=torch.float64) for value in (total, squares, count))
    if float(count) < 2:
        raise ValueError(f"global_statistics: a std needs at least two samples, not {int(count)}")
    mean = total / count
    return mean, ((squares - count * mean.square()) / (count - 1)).clamp(min=0).sqrt()


def below_threshold(rewards: Float[Tensor, " b"], prompt_ids: Ids, threshold: float) -> Bool[Tensor, " b"]:
    """Samples of the groups whose mean reward is strictly below the threshold."""
    below = torch.zeros_like(rewards, dtype=torch.bool)
    for index in groups(rewards, prompt_ids).values():
        below[index] = rewards[index].double().mean() < threshold
    return below


def zero_variance(rewards: Float[Tensor, " b"], prompt_ids: Ids) -> Bool[Tensor, " b"]:
    """Samples of the groups whose rewards are all equal: nothing in them is better than the rest."""
    equal = torch.zeros_like(rewards, dtype=torch.bool)
    for index in groups(rewards, prompt_ids).values():
        equal[index] = rewards[index].max() == rewards[index].min()
    return equal


def best_of_n(advantages: Float[Tensor, " b"], prompt_ids: Ids, keep: int) -> Bool[Tensor, " b"]:
    """The `keep` / 2 best and the `keep` / 2 worst samples of each group; advantages stay as they are."""
    kept = torch.zeros_like(advantages, dtype=torch.bool)
    for prompt_id, index in groups(advantages, prompt_ids).items():
        if keep < 2 or keep % 2 or keep > len(index):
            raise ValueError(f"best_of_n: cannot keep {keep} of the {len(index)} samples of prompt {prompt_id!r}")
        order = index[advantages[index].argsort(stable=True)]
        kept[order[: keep // 2]] = True
        kept[order[len(order) - keep // 2 :]] = True
    return kept


def spread(rewards: Float[Tensor, " b"], prompt_ids: Ids) -> tuple[float, float]:
    """Spread of the rewards in groups (mean of their stds) and between them (std of their means; 0 for one group)."""
    parts = [rewards[index].double() for index in groups(rewards, prompt_ids).values()]
    means = torch.stack([part.mean() for part in parts])
    within = torch.stack([part.std() for part in parts]).mean()
    return float(within), float(means.std()) if len(parts) > 1 else 0.0


def curriculum(failures: Float[Tensor, " p"] | Sequence[int]) -> Float[Tensor, " p"]:
    """Chance of each prompt to be drawn, in proportion to failures + 1."""
    counts = torch.as_tensor(failures, dtype=torch.float64)
    if bool((counts < 0).any()):
        raise ValueError("curriculum: failures are counts and cannot be negative")
    return (counts + 1) / (counts + 1).sum()


def vtrace(
    log_rho: Float[Tensor, "*b s"],
    rewards: Float[Tensor, "*b s"],
    values: Float[Tensor, "*b s"],
    discounts: Float[Tensor, "*b s"],
    bootstrap: Float[Tensor, "*b"] | float,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
) -> tuple[Float[Tensor, "*b s"], Float[Tensor, "*b s"]]:
    """Off-policy targets vs and advantages td (V-trace, arXiv:1802.01561); steps run along the last axis.

    rho_b = min(rho, rho_bar), c = min(rho, c_bar), delta = rho_b (r + gamma V' - V), acc = delta + gamma c acc';
    vs = V + acc and td = r + gamma vs' - V, without rho_b: a ratio objective brings its own. V' after the last step
    is `bootstrap`. No gradient.
    """
    log_rho, rewards, values, discounts = (x.detach() for x in (log_rho, rewards, values, discounts))
    rho = log_rho.exp()
    last = torch.as_tensor(bootstrap, dtype=values.dtype, device=values.device).detach().expand(values.shape[:-1])
    following = torch.cat([values[..., 1:], last[..., None]], -1)
    deltas = rho.clamp(max=rho_bar) * (rewards + discounts * following - values)
    carried, acc = discounts * rho.clamp(max=c_bar), torch.zeros_like(values)
    after = torch.zeros_like(last)
    for s in reversed(range(values.shape[-1])):
        after = deltas[..., s] + carried[..., s] * after
        acc[..., s] = after
    vs = values + acc
    return vs, rewards + discounts * torch.cat([vs[..., 1:], last[..., None]], -1) - values


def terminal_advantages(log_rho: Float[Tensor, "b s"], advantages: Float[Tensor, " b"]) -> Float[Tensor, "b s"]:
    """V-trace's td without a critic, for a reward at the end: A times the product of min(1, rho) of later steps."""
    trust = log_rho.detach().exp().clamp(max=1)
    later = torch.cat([trust[:, 1:], torch.ones_like(trust[:, :1])], 1)
    return advantages[:, None] * later.flip(1).cumprod(1).flip(1)


def groups(rewards: Tensor, prompt_ids: Ids) -> dict[Hashable, Tensor]:
    """Positions of each prompt id's samples."""
    ids = prompt_ids.tolist() if isinstance(prompt_ids, Tensor) else list(prompt_ids)
    if len(ids) != len(rewards):
        raise ValueError(f"{len(rewards)} rewards but {len(ids)} prompt ids")
    positions: dict[Hashable, list[int]] = {}
    for position, prompt_id in enumerate(ids):
        positions.setdefault(prompt_id, []).append(position)
    return {key: torch.tensor(index, device=rewards.device) for key, index in positions.items()}


def _weighted(rewards: Tensor, prompt_ids: Ids, weights: Sequence[float] | None) -> Float[Tensor, " b"]:
    """The weighted sum of each reward's grpo advantages."""
    parts = rewards[:, None] if rewards.ndim == 1 else rewards
    weights = [1.0] * parts.shape[1] if weights is None else weights
    if len(weights) != parts.shape[1]:
        raise ValueError(f"gdpo: {parts.shape[1]} rewards but {len(weights)} weights")
    normalised = [group_advantages(part, prompt_ids) for part in parts.unbind(1)]
    return sum(weight * part for weight, part in zip(weights, normalised, strict=True))


def _standardised(values: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
    """(x - mean) / (std + eps) over all; equal values give exactly 0."""
    if values.max() == values.min():
        return torch.zeros_like(values)
    values = values - values[0]  # sums of squares lose the spread of values far from 0
    mean, std = global_statistics(*totals(values))
    return (values - mean) / (std + EPS)
