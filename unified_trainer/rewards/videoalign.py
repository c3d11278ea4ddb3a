"""The scorer videoalign: visual quality, motion quality and text alignment of videos, predicted by Qwen2-VL.

It is VideoReward of VideoAlign (arXiv:2501.13918), in its published layout: model_config.json, and checkpoint-N with
model.pth and a tokenizer.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import interpolate
from transformers import Qwen2Tokenizer

from unified_trainer.basics.effects import READS
from unified_trainer.basics.errors import UserError
from unified_trainer.basics.input_files import Schema, check_file, checked, read_json
from unified_trainer.basics.ranges import Finite, Positive
from unified_trainer.basics.types import PerSample, Video
from unified_trainer.models import hub
from unified_trainer.models.folder import read_tokenizer
from unified_trainer.models.tensor_file import floating_shapes, opened
from unified_trainer.rewards.base import NetworkScorer, PromptRules, ScorerConfig, check_path, check_pixels
from unified_trainer.rewards.hpsv3_folder import base_config
from unified_trainer.rewards.hpsv3_network import RewardNetwork, outlined
from unified_trainer.rewards.hpsv3_preprocessing import Preprocessor, special_tokens
from unified_trainer.rewards.own_settings import ScorerSettings, kind_of

TEXTS = Path(__file__).parents[1] / "assets" / "videoalign.json"  # the prompt that the weights were trained with
PARTS = ("VQ", "MQ", "TA")
FEWEST_PIXELS, FEWEST_FRAMES, MOST_FRAMES = 128 * 28 * 28, 4, 768  # of a frame, and of a video
BASE_FILES = ("config.json", "preprocessor_config.json", "chat_template.json")
PREFIX, LAYER = "base_model.model.", ".base_layer.weight"  # of peft
FACTOR = re.compile(r"\.lora_[AB]\.default\.weight$")
Above0 = Annotated[float, Field(gt=0, le=1e6)]


class Published(Schema):
    """The fields of all sections of model_config.json: frames and text, head, adapters, statistics of each part."""

    fps: float = Field(gt=0, le=1000)
    num_frames: None = None
    max_frame_pixels: int = Field(ge=FEWEST_PIXELS, le=2**26)
    sample_type: Literal["uniform"] = "uniform"
    prompt_template_type: Literal["detailed_special"]
    output_dim: Literal[1]
    use_special_tokens: Literal[True]
    lora_r: int = Field(ge=1, le=2**16)
    lora_alpha: Above0
    use_rslora: Literal[False] = False
    VQ_mean: float = Field(ge=-1e6, le=1e6)
    MQ_mean: float = Field(ge=-1e6, le=1e6)
    TA_mean: float = Field(ge=-1e6, le=1e6)
    VQ_std: Above0
    MQ_std: Above0
    TA_std: Above0


@dataclass(frozen=True, kw_only=True)
class VideoAlign(ScorerSettings):
    """quality VQ + motion MQ + alignment TA, each normalised by the statistics of model_config.json."""

    frame_rate: Positive
    """Frames per second of the videos."""
    quality: Finite = 1.0
    """Factor of visual quality, VQ."""
    motion: Finite = 1.0
    """Factor of motion quality, MQ."""
    alignment: Finite = 1.0
    """Factor of text alignment, TA."""
    base: Annotated[str, READS] = "Qwen/Qwen2-VL-2B-Instruct"
    """Folder or hub id of the base model; config.json, preprocessor_config.json and chat_template.json are read."""
    min_frames = 2
    files = ("model_config.json", "checkpoint-*/model.pth", "checkpoint-*/tokenizer/*")

    def check(self, config: ScorerConfig, key: str, frames: int) -> None:
        """Raise UserError, naming the key, unless all frames come, whose rate is known, and some part counts."""
        check_path(config, key, frames)
        if config.frames != "all":
            raise UserError(f"{key}.frames must be all, not {config.frames}: settings.frame_rate tells which are seen")
        if not (self.quality or self.motion or self.alignment):
            raise UserError(f"{key}.settings: quality, motion and alignment are all 0, so nothing is scored")
        for name in () if hub.is_hub_id(self.base) else BASE_FILES:
            check_file(Path(self.base, name), f"{key}.settings.base")

    def load(self, config: ScorerConfig, device: torch.device) -> NetworkScorer:
        """Load the network with its adapters merged; raise UserError, naming the file, unless all parts fit."""
        published, file = _published(config)
        base = hub.download(self.base, "settings.base", BASE_FILES) if hub.is_hub_id(self.base) else Path(self.base)
        shapes, rank = floating_shapes(file), published.lora_r
        own = [key for key in shapes if not (FACTOR.search(key) and FACTOR.sub(LAYER, key) in shapes)]
        keys = {key.removeprefix(PREFIX).replace(".base_layer.", "."): key for key in own}
        sizes = {name: shapes[key] for name, key in keys.items()}
        model = base_config(base, sizes, file)
        network = outlined(
            lambda: RewardNetwork(model, nn.Linear(model.text_config.hidden_size, 1, bias=False)),
            sizes,
            base / "config.json",
            file,
        )
        preprocessor = Preprocessor.of(
            base,
            model,
            kind="video",
            scorer="VideoAlign",
            tokenizer=read_tokenizer(Qwen2Tokenizer, file.parent / "tokenizer", model.text_config.vocab_size),
            text_around=read_json(TEXTS)["detailed_special"],
            reward_tokens=tuple(f"<|{part}_reward|>" for part in PARTS),
            pixels=(FEWEST_PIXELS, published.max_frame_pixels),
            image_token_id=model.video_token_id,
        )
        with opened(file) as held:

            def merged(name: str) -> Tensor:
                key, weight = keys[name], held.get_tensor(keys[name])
                if not key.endswith(LAYER):
                    return weight
                factors = [key.replace("base_layer", f"lora_{factor}.default") for factor in "BA"]
                if [shapes.get(factor) for factor in factors] != [(len(weight), rank), (rank, weight.shape[-1])]:
                    raise UserError(f"{file}: {' and '.join(factors)} are no factors of rank lora_r, {rank}")
                up, down = (held.get_tensor(factor).float() for factor in factors)
                return weight.float() + published.lora_alpha / rank * up @ down

            network.filled(model, merged, device, config.dtype)
        statistics = published.model_dump()
        mean, std = (torch.tensor([statistics[f"{part}_{name}"] for part in PARTS]) for name in ("mean", "std"))
        weights = torch.tensor([self.quality, self.motion, self.alignment])

        def score(video: Video, prompts: Sequence[str]) -> PerSample:
            preprocessor.refuse(prompts, len(video))
            check_pixels(video.flatten(2, 3), "VideoAlign")
            times = frames_seen(video.shape[2], published.fps / self.frame_rate)
            count, parts = max(1, config.batch // len(times)), []
            for first in range(0, len(video), count):
                clips = video[first : first + count, :, times].movedim(1, 2)
                inputs = preprocessor.inputs([_patches(clip, preprocessor) for clip in clips], prompts[first:][:count])
                parts.append(network(inputs.to(network.model.embed_tokens.weight.device)).view(-1, len(PARTS)))
            scores = torch.cat(parts)
            return ((scores - mean.to(scores)) / std.to(scores)) @ weights.to(scores)

        return NetworkScorer(score, (network,))


def frames_seen(frames: int, share: float) -> list[int]:
    """Return the frames of a video that are seen: an even number, spread evenly, about a `share` of them."""
    count = min(max(frames * share, FEWEST_FRAMES), min(MOST_FRAMES, frames) // 2 * 2)
    return torch.linspace(0, frames - 1, round(count / 2) * 2).round().long().tolist()


def _patches(clip: Float[Tensor, "t 3 h w"], preprocessor: Preprocessor) -> tuple[Tensor, tuple[int, int, int]]:
    """Resize frames (bicubic, antialiased) and cut them; they are rounded to 8 bits unless they take a gradient."""
    rounded = (lambda x: x) if clip.requires_grad else torch.round
    small = interpolate(rounded(255 * clip.float()), preprocessor.fit(clip), mode="bicubic", antialias=True)
    return preprocessor.normalised(rounded(small.clamp(0, 255)) / 255)


def _published(config: ScorerConfig) -> tuple[Published, Path]:
    """Return the settings of a folder and the weights of its newest checkpoint; UserError if one is not there."""
    folder, begin = Path(config.path), "checkpoint-"
    sections = read_json(settings := folder / "model_config.json").values()
    fields = {name: value for part in sections if isinstance(part, dict) for name, value in part.items()}
    published = checked(Published, fields, str(settings))
    steps = [int(found.name.removeprefix(begin)) for found in folder.glob(f"{begin}*") if found.name[11:].isdigit()]
    check_file(file := folder / f"{begin}{max(steps, default='N')}" / "model.pth")
    return published, file


def _prompt_rules(config: ScorerConfig) -> PromptRules:
    tokenizer = read_tokenizer(Qwen2Tokenizer, _published(config)[1].parent / "tokenizer")
    return PromptRules(special_tokens(tokenizer))


KIND = replace(kind_of("videoalign", VideoAlign), prompt_rules=_prompt_rules)
