"""The reward of an evaluation: one set of scorers that measures all checkpoints."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.plugins import agree_to_scorer
from unified_trainer.rewards.base import RewardConfig, ScorerConfig
from unified_trainer.rewards.scorers import scorer_kind
from unified_trainer.run.settings.command_line import read_reward
from unified_trainer.tools.evaluate.checkpoints import Checkpoint


def common_reward(checkpoints: Sequence[Checkpoint], file: Path | None, held_out: Sequence[str]) -> RewardConfig:
    """Return the reward of the file, or of the first checkpoint that has one, and the scorers that are held out.

    Scorers that only other checkpoints have are held out too. Raise UserError if two of one name differ in more than
    their weight, or for a scorer of `held_out` that is the reward's only one.
    """
    if file is not None:
        reward = read_reward(file)
    else:
        configs = [checkpoint.run.reward for checkpoint in checkpoints]
        reward = next((checkpoint for checkpoint in configs if checkpoint.named()), configs[0])
        for checkpoint in checkpoints:
            for name, part in checkpoint.run.reward.named().items():
                reward = _with(reward, name, part, checkpoint.name)
    for kind in held_out:
        name = kind.rpartition(":")[2]
        agree_to_scorer(kind, f"reward.scorers.{name}.kind")
        if name == reward.first:
            raise UserError(f"--held-out {kind}: it is the first scorer of the reward, reward.kind; leave it out")
        part = reward.scorers.get(name)
        if part is None:  # it sees all frames if one is too few for it
            part = ScorerConfig(kind=kind)
            least = scorer_kind(part, f"--held-out {kind}", reward.timeout).min_frames
            part = dataclasses.replace(part, frames="all") if least > 1 else part
        part = dataclasses.replace(part, kind=part.kind or kind, weight=0.0)
        reward = dataclasses.replace(reward, scorers=reward.scorers | {name: part})
    reward.check()
    return reward


def _with(reward: RewardConfig, name: str, part: ScorerConfig, checkpoint: str) -> RewardConfig:
    """Return the reward with one more scorer, held out, unless it has it already."""
    have = reward.named()
    if name not in have:
        held = dataclasses.replace(part, weight=0.0)
        return dataclasses.replace(reward, scorers=reward.scorers | {name: held})
    if dataclasses.replace(have[name], weight=part.weight) != part:
        raise UserError(
            f"{checkpoint} has other settings of the scorer {name} than a checkpoint before it: give those of all with "
            "--reward FILE, a YAML file with a section reward"
        )
    return reward
