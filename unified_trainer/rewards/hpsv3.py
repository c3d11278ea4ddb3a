"""The scorer hpsv3: how much people prefer an image for a prompt, predicted by Qwen2-VL (HPSv3, arXiv:2508.03789)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import Qwen2Tokenizer

from unified_trainer.basics.errors import NotFiniteError, UserError
from unified_trainer.models.folder import read_tokenizer
from unified_trainer.models.tensor_file import opened
from unified_trainer.rewards.base import Features, NetworkScorer, PromptRules, ScorerConfig, ScorerKind, of_images
from unified_trainer.rewards.hpsv3_folder import CHECKPOINT, check_folder, network_config
from unified_trainer.rewards.hpsv3_network import RewardNetwork, skeleton
from unified_trainer.rewards.hpsv3_preprocessing import Images, Preprocessor, as_bytes, special_tokens

EMBEDDED = Path(__file__).parents[1] / "assets" / "tiny" / "hpsv3"  # the folder that the path "tiny" means


@dataclass(frozen=True)
class HPSv3:
    """A native implementation of HPSv3; it agrees with the package hpsv3 1.0.0 to float32 rounding."""

    network: RewardNetwork
    preprocessor: Preprocessor

    @classmethod
    def load(cls, folder: Path | str, device: torch.device | str, dtype: torch.dtype) -> "HPSv3":
        """Load a frozen scorer from a folder written by `import-hpsv3`; `dtype` is the backbone's.

        Raise UserError, before any weight is read, when the folder is not whole or not consistent.
        """
        folder = Path(folder)
        config = network_config(folder)
        preprocessor = Preprocessor.load(folder, config)
        network = skeleton(config, folder / "config.json", folder / CHECKPOINT)
        with opened(folder / CHECKPOINT) as file:
            return cls(network.filled(config, file.get_tensor, device, dtype), preprocessor)

    def score(self, images: Images, prompts: Sequence[str]) -> Float[Tensor, "b 2"]:
        """Return (mu, raw sigma) of each image for its prompt; mu is the reward, exp(raw sigma) its deviation.

        Images are a tensor in [0, 1], PIL images or paths. A tensor that takes a gradient gets it; others are rounded
        to 8 bits. Raise UserError for a prompt with a special token, NotFiniteError for a score, ValueError for an
        image outside [0, 1]; all name the sample.
        """
        scores = self.network(self.preprocessor(images, prompts).to(next(self.network.parameters()).device))
        for i in (~scores.isfinite().all(-1)).nonzero().flatten().tolist():
            raise NotFiniteError(f"HPSv3: the score of sample {i} is {scores[i].tolist()} (prompt {prompts[i]!r})")
        return scores

    @torch.no_grad()
    def features(self, images: Images) -> Float[Tensor, "b d"]:
        """Return the mean of each image's vision tokens, which the Frechet distance compares."""
        device = next(self.network.parameters()).device
        patches, grids = zip(*(self.preprocessor.patches(image) for image in as_bytes(images)), strict=True)
        grid_rows = torch.tensor(grids)
        tokens = self.network.visual(torch.cat(patches).to(device), grid_thw=grid_rows.to(device)).pooler_output
        counts = (grid_rows.prod(-1) // self.preprocessor.merge_size**2).tolist()
        return torch.stack([part.float().mean(0) for part in tokens.split(counts)])


@dataclass(frozen=True)
class HPSv3Scorer(NetworkScorer):
    """HPSv3's mu as a scorer of videos, and its image features."""

    features: Features


def _prompt_rules(config: ScorerConfig) -> PromptRules:
    check_folder(_folder(config))
    return PromptRules(special_tokens(read_tokenizer(Qwen2Tokenizer, _folder(config))))


def _folder(config: ScorerConfig) -> Path:
    return EMBEDDED if config.path == "tiny" else Path(config.path)


def _load(config: ScorerConfig, device: torch.device) -> HPSv3Scorer:
    hpsv3 = HPSv3.load(_folder(config), device, config.dtype)
    mu = of_images(lambda *images: hpsv3.score(*images)[:, 0], config.batch, config.top_fraction)
    return HPSv3Scorer(mu, (hpsv3.network,), hpsv3.features)


def _check(config: ScorerConfig, key: str, frames: int) -> None:
    if not config.path:
        raise UserError(f"{key}.path must be the folder of a {config.kind} scorer, not {config.path!r}")


KIND = ScorerKind(
    "hpsv3",
    _load,
    _check,
    features=lambda scorer: scorer.features,
    per_frame=True,
    prompt_rules=_prompt_rules,
)
