"""The command score: it scores saved rollouts with another reward, without generating them again."""

from pathlib import Path
from typing import Annotated

import tyro

from unified_trainer.basics.terminal import say
from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.parallel.device import Device, fitting
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.rewards.latents import reward_of
from unified_trainer.rewards.scorers import check_reward, load_scorers
from unified_trainer.run.registry import add_families, family_of
from unified_trainer.run.settings.command_line import read_reward
from unified_trainer.tools.sample.rollout_folder import RolloutFolder


def score(
    folder: Annotated[Path, tyro.conf.Positional],
    reward: Path,
    name: str,
    device: Device = "auto",
    base: Path | None = None,
) -> None:
    """Add the scores of another reward to a folder that the command rollout wrote; called again, it continues.

    Only such a folder: it holds latents and their prompts. Videos in mp4 files are not scored.

    Args:
        folder: Folder that the command rollout wrote.
        reward: YAML file with a section reward, as in a recipe.
        name: Name of the scores in scores/NAME.jsonl, which must be absent or of this reward.
        device: Device to run on.
        base: Pipeline folder whose VAE decodes the latents, if it is no longer where the rollouts found it.
    """
    rollouts, rewards = RolloutFolder.read(folder), read_reward(reward)
    check_reward(rewards, rollouts.about["video"]["frames"])
    mesh = Mesh.join(device)
    add_families(rollouts.about.get("families", ()))
    family, path = family_of("--base", str(base or rollouts.about["base"]))
    codec = family.codec(path, mesh.device, EncoderConfig())
    scorers, _ = load_scorers(rewards, mesh.device)
    with fitting(f"a batch of {len(rollouts.parts[0])} samples", "call rollout with a lower --batch"):
        mean = rollouts.score(name, reward_of(scorers, codec, rewards), codec, mesh.device)
    message = f"{len(rollouts.samples)} samples in {folder / 'scores' / name}.jsonl, mean reward {mean:.4g}"
    say(message)
