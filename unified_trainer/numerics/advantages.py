"""Advantages from rewards and values, reward statistics and sample selection."""

import math
from collections.abc import Hashable, Sequence
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unified_trainer.basics.types import widest

Estimator = Literal["grpo", "dr_grpo", "rloo", "global", "global_std", "largest_std", "gdpo"]
Ids = Sequence[Hashable] | Tensor  # prompt id of each sample; equal ids are one group
EPS = 1e-8  # added to a standard deviation
ROUNDINGS = 100  # machine epsilons by which equal rewards may differ: a network adds up in another order
GLOBAL_STD_EPS = 1e-4  # added to the standard deviation of `global_std`


def group_advantages(
    rewards: Float[Tensor, " b"] | Float[Tensor, "b r"],
    prompt_ids: Ids,
    estimator: Estimator = "grpo",
    *,
    weights: Sequence[float] | None = None,
) -> Float[Tensor, " b"]:
    """Return the advantage of each sample within the group of its prompt id; the order of samples does not matter.

    With the mean and the Bessel-corrected std of the group, its size n, and mean_all and std_all of the batch:
    `grpo`: (r - mean) / (std + 1e-8) (arXiv:2402.03300). `dr_grpo`: r - mean (arXiv:2503.20783).
    `rloo`: n / (n - 1) (r - mean), that is r minus the mean of the other samples (arXiv:2402.14740).
    `global`: (r - mean_all) / (std_all + 1e-8). `global_std`: (r - mean) / (std_all + 1e-4).
    `largest_std`: (r - mean) / (the largest std of a group + 1e-8) (LongCat-Video, arXiv:2510.22200).
    `gdpo`: for rewards [b, r], the weighted sum of the r grpo advantages, then as `global` (arXiv:2601.05242).

    A group of equal rewards gets exactly 0, except under `global` where those of others differ. Rewards are equal if
    they differ by no more than rounding, 100 machine epsilons of the largest (1.2e-5 in float32). `weights` are those
    of gdpo, 1 each by default. Computed in float64, returned in the dtype of `rewards`. Raises ValueError for a group
    of one sample.
    """
    if estimator not in get_args(Estimator):
        raise ValueError(f"unknown advantage estimator {estimator!r}; have {', '.join(get_args(Estimator))}")
    if rewards.ndim == 2 and estimator != "gdpo":
        raise ValueError(f"{estimator} takes one reward per sample, not {rewards.shape[1]}; gdpo takes several")
    positions = groups(rewards, prompt_ids)
    for prompt_id, index in positions.items():
        if len(index) < 2:
            raise ValueError(f"prompt {prompt_id!r} has one sample: a group needs at least two")
    r = rewards.double()
    if estimator == "gdpo":
        advantages = standardized(_weighted(r, prompt_ids, weights))
    elif estimator == "global":
        advantages = torch.zeros_like(r) if _equal(rewards) else standardized(r)
    else:
        centered = torch.zeros_like(r)
        scale = torch.ones_like(r)
        for index in positions.values():
            group = r[index]
            if not _equal(rewards[index]):
                centered[index] = group - group.mean()
            if estimator == "grpo":
                scale[index] = group.std() + EPS
            if estimator == "rloo":
                scale[index] = (len(index) - 1) / len(index)
        if estimator == "largest_std":
            scale = max(r[index].std() for index in positions.values()) + EPS
        if estimator == "global_std":
            scale = global_statistics(*totals(r - r[0]))[1] + GLOBAL_STD_EPS
        advantages = centered / scale
    return advantages.to(rewards.dtype)


def group_means(
    values: Float[Tensor, "b k"], prompt_ids: Int[Tensor, " b"], weights: Float[Tensor, " b"]
) -> Float[Tensor, "b k"]:
    """Return for each sample the weighted means of its group's k values; 0 for a group of weight 0.

    Computed in the widest dtype of the device, from which nothing is read, and returned in that of `values`.
    """
    dtype, values = values.dtype, values.to(widest(values.device))
    shares = torch.where(prompt_ids[:, None] == prompt_ids, weights, 0.0).to(values)
    total = shares.sum(1, keepdim=True)
    return (shares @ values / total.where(total > 0, 1.0)).to(dtype)


def tilt_weights(
    rewards: Float[Tensor, " b"], prompt_ids: Ids, beta: float, largest: float = float("inf")
) -> Float[Tensor, " b"]:
    """Return exp((r - m) / beta) of each sample, at most `largest`, divided by their mean over all samples; float64.

    m is the mean of the other samples of its group, so that it does not depend on r: weighting samples of a law q so
    gives the law q exp(r / beta) / Z of each prompt, but for the weights at `largest`. With the mean of the whole group
    it would be that of beta n / (n - 1), n the size of the group. A negative beta tilts away from the reward.

    Raises ValueError for a group of one sample.
    """
    weights = (group_advantages(rewards.double(), prompt_ids, "rloo") / beta).exp().clamp(max=largest)
    return weights / weights.mean()


def capped_share(rewards: Float[Tensor, " b"], prompt_ids: Ids, beta: float, largest: float) -> float:
    """Return the share of samples whose weight in `tilt_weights` is cut to `largest`."""
    exponents = group_advantages(rewards.double(), prompt_ids, "rloo") / beta
    return float((exponents > math.log(largest)).double().mean())


def totals(values: Float[Tensor, " b"]) -> Float[Tensor, "3"]:
    """Return sum, sum of squares and count as float64; their sums over ranks go into `global_statistics`."""
    values = values.double()
    return torch.stack([values.sum(), values.square().sum(), torch.tensor(len(values)).to(values)])


def global_statistics(total: Tensor | float, squares: Tensor | float, count: Tensor | float) -> tuple[Tensor, Tensor]:
    """Return mean and Bessel-corrected std of all samples from the sums of every rank's `totals`.

    Raises ValueError if `count` is below 2.
    """
    total, squares, count = (torch.as_tensor(value, dtype=torch.float64) for value in (total, squares, count))
    if float(count) < 2:
        raise ValueError(f"global_statistics: a std needs at least two samples, not {int(count)}")
    mean = total / count
    return mean, ((squares - count * mean.square()) / (count - 1)).clamp(min=0).sqrt()


def standardized(values: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
    """Return (x - mean) / (std + 1e-8) over all values; equal values give exactly 0."""
    if values.max() == values.min():
        return torch.zeros_like(values)
    values = values - values[0]  # sums of squares would cancel for values far from 0
    mean, std = global_statistics(*totals(values))
    return (values - mean) / (std + EPS)


def below_threshold(rewards: Float[Tensor, " b"], prompt_ids: Ids, threshold: float) -> Bool[Tensor, " b"]:
    """Return which samples belong to a group whose mean reward is strictly below the threshold."""
    below = torch.zeros_like(rewards, dtype=torch.bool)
    for index in groups(rewards, prompt_ids).values():
        below[index] = rewards[index].double().mean() < threshold
    return below


def zero_variance(rewards: Float[Tensor, " b"], prompt_ids: Ids) -> Bool[Tensor, " b"]:
    """Return which samples belong to a group of equal rewards, up to rounding as `group_advantages`."""
    equal = torch.zeros_like(rewards, dtype=torch.bool)
    for index in groups(rewards, prompt_ids).values():
        equal[index] = _equal(rewards[index])
    return equal


def _equal(rewards: Tensor) -> bool:
    """Return whether rewards differ by no more than a scorer's rounding; networks round to float32 or worse."""
    epsilon = min(torch.finfo(kind).eps for kind in (rewards.dtype, torch.float32))
    return bool(rewards.max() - rewards.min() <= ROUNDINGS * epsilon * rewards.abs().max())


def best_of_n(advantages: Float[Tensor, " b"], prompt_ids: Ids, keep: int) -> Bool[Tensor, " b"]:
    """Return which samples are among the `keep` / 2 best or the `keep` / 2 worst of their group.

    Raises ValueError if `keep` is odd, below 2, or above a group's size.
    """
    kept = torch.zeros_like(advantages, dtype=torch.bool)
    for prompt_id, index in groups(advantages, prompt_ids).items():
        if keep < 2 or keep % 2 or keep > len(index):
            raise ValueError(f"best_of_n: cannot keep {keep} of the {len(index)} samples of prompt {prompt_id!r}")
        order = index[advantages[index].argsort(stable=True)]
        kept[order[: keep // 2]] = True
        kept[order[len(order) - keep // 2 :]] = True
    return kept


def spread(rewards: Float[Tensor, " b"], prompt_ids: Ids) -> tuple[float | None, float]:
    """Return the mean of the groups' reward stds, and the std of the groups' mean rewards (0 for one group).

    A group of one sample has no std; the mean is None if every group has one.
    """
    parts = [rewards[index].double() for index in groups(rewards, prompt_ids).values()]
    means = torch.stack([part.mean() for part in parts])
    stds = [part.std() for part in parts if len(part) > 1]
    within = float(torch.stack(stds).mean()) if stds else None
    return within, float(means.std()) if len(parts) > 1 else 0.0


def curriculum(failures: Float[Tensor, " p"] | Sequence[int]) -> Float[Tensor, " p"]:
    """Return the probability of drawing each prompt, proportional to its number of failures + 1."""
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
    trace_decay: float = 1.0,
) -> tuple[Float[Tensor, "*b s"], Float[Tensor, "*b s"]]:
    """Return V-trace value targets vs and differences td (arXiv:1802.01561), float64; the last axis is time.

    With V = values, r = rewards, gamma = discounts, lambda = trace_decay, rho = exp(log_rho), and ' for the next step:
    delta = min(rho, rho_bar) (r + gamma V' - V), acc = delta + gamma lambda min(rho, c_bar) acc', vs = V + acc and
    td = r + gamma (V' + lambda acc') - V. td has no factor rho, because a ratio objective multiplies by its own ratio.
    V' after the last step is `bootstrap`, and acc' is 0 there. All inputs are detached.
    """
    log_rho, rewards, values, discounts = (x.detach().double() for x in (log_rho, rewards, values, discounts))
    rho = log_rho.exp()
    last = torch.as_tensor(bootstrap, dtype=torch.float64, device=values.device).detach().expand(values.shape[:-1])
    following = torch.cat([values[..., 1:], last[..., None]], -1)
    deltas = rho.clamp(max=rho_bar) * (rewards + discounts * following - values)
    trace, acc = discounts * trace_decay * rho.clamp(max=c_bar), torch.zeros_like(values)
    after, later = torch.zeros_like(last), torch.zeros_like(values)
    for s in reversed(range(values.shape[-1])):
        later[..., s] = after
        after = deltas[..., s] + trace[..., s] * after
        acc[..., s] = after
    return values + acc, rewards + discounts * (following + trace_decay * later) - values


def gae(
    rewards: Float[Tensor, "*b s"],
    values: Float[Tensor, "*b s"],
    discounts: Float[Tensor, "*b s"],
    bootstrap: Float[Tensor, "*b"] | float,
    trace_decay: float,
) -> tuple[Float[Tensor, "*b s"], Float[Tensor, "*b s"]]:
    """Return value targets V + A and advantages A of GAE(lambda) (arXiv:1506.02438): `vtrace` at ratio 1.

    delta = r + gamma V' - V, A = delta + gamma lambda A', lambda = trace_decay. With lambda = 1, A is the discounted
    return minus the value; with lambda = 0 it is delta.
    """
    return vtrace(torch.zeros_like(values), rewards, values, discounts, bootstrap, trace_decay=trace_decay)


def groups(rewards: Tensor, prompt_ids: Ids) -> dict[Hashable, Tensor]:
    """Return the positions of each prompt id's samples, in order of first appearance."""
    ids = prompt_ids.tolist() if isinstance(prompt_ids, Tensor) else list(prompt_ids)
    if len(ids) != len(rewards):
        raise ValueError(f"{len(rewards)} rewards but {len(ids)} prompt ids")
    positions: dict[Hashable, list[int]] = {}
    for position, prompt_id in enumerate(ids):
        positions.setdefault(prompt_id, []).append(position)
    return {key: torch.tensor(index, device=rewards.device) for key, index in positions.items()}


def _weighted(rewards: Tensor, prompt_ids: Ids, weights: Sequence[float] | None) -> Float[Tensor, " b"]:
    """Return the weighted sum of each reward's grpo advantages."""
    parts = rewards[:, None] if rewards.ndim == 1 else rewards
    weights = [1.0] * parts.shape[1] if weights is None else weights
    if len(weights) != parts.shape[1]:
        raise ValueError(f"gdpo: {parts.shape[1]} rewards but {len(weights)} weights")
    advantages = [group_advantages(part, prompt_ids) for part in parts.unbind(1)]
    return sum(weight * part for weight, part in zip(weights, advantages, strict=True))
