"""This stage of build_tiny_world trains the small HPSv3: first its vision, then to rank right over wrong and defect."""

import json
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import tyro
from jaxtyping import Float
from safetensors.torch import save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional
from transformers import Qwen2Tokenizer, Qwen2VLConfig

from unified_trainer.data import tiny_world
from unified_trainer.rewards.hpsv3 import HPSv3
from unified_trainer.rewards.hpsv3_folder import CHECKPOINT, REWARD_TOKEN, SETTINGS
from unified_trainer.rewards.hpsv3_network import hpsv3_network
from unified_trainer.rewards.hpsv3_preprocessing import Preprocessor

log = logging.getLogger(__name__)

INSTRUCTION = "\nMark this picture of {text_prompt}\n"
PROMPT_WITH_SPECIAL_TOKEN = f"Mark: {REWARD_TOKEN}"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PIXELS = 16 * 28 * 28  # 112 x 112 after resizing, 16 image tokens
CHAT_TOKENS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
VOCABULARY = 400  # the 256 bytes and the words of captions and instruction
HEAD_WIDTHS = (128, 16)
SIGHT_STEPS = 300
SIGHT_BATCH = 64
SIGHT_LEARNING_RATE = 2e-3
GROUPS_PER_STEP = 8
LEARNING_RATE = 1e-3
WARMUP_STEPS = 40
CENTRE_WEIGHT = 0.005  # of the mean square of mu: ranking alone leaves its origin free for every caption
HELD_OUT_GROUPS = 440  # for each of the two sets of subjects measured

Frame = Float[Tensor, "3 h w"]
T = TypeVar("T")


@dataclass(frozen=True)
class Group:
    """Pictures for one caption, and `pairs` of indices: the preferred picture and the other."""

    caption: str
    kinds: tuple[str, ...]
    frames: Float[Tensor, "n 3 h w"]
    pairs: tuple[tuple[int, int], ...]


def main(out: Path, steps: int = 1600, seed: int = 0) -> None:
    """Train the small HPSv3 and write its folder.

    Args:
        out: folder to write
        steps: optimizer steps, each of eight captions with seven pictures
        seed: seed of the initial weights and of every picture
    """
    started = time.monotonic()
    hpsv3 = create(out, seed)
    learn_to_see(hpsv3, seed)
    train(hpsv3, steps, seed)
    (out / CHECKPOINT).write_bytes(save(hpsv3.network.state_dict()))
    subjects = {"seen": tiny_world.TRAINING, "held_out": tiny_world.HELD_OUT}
    measured = {
        "seed": seed,
        "steps": steps,
        "seconds": round(time.monotonic() - started),
        **{name: measure(hpsv3, chosen, seed + 1) for name, chosen in subjects.items()},
    }
    (out / "measured.json").write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")
    log.info("wrote %s: %s", out, json.dumps(measured))


def create(out: Path, seed: int) -> HPSv3:
    """Write the folder without weights, and return the untrained network."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(out)
    texts = {
        SETTINGS: {
            "instruction": INSTRUCTION,
            "prompt_with_special_token": PROMPT_WITH_SPECIAL_TOKEN,
            "pixels": PIXELS,
        },
        "chat_template.json": {"chat_template": CHAT_TEMPLATE},
        "preprocessor_config.json": {
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711],
            "image_processor_type": "Qwen2VLImageProcessor",
        },
    }
    for name, content in texts.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    config = build_config(tokenizer)
    config.save_pretrained(out)
    torch.manual_seed(seed)
    return HPSv3(hpsv3_network(config, HEAD_WIDTHS), Preprocessor.load(out, config))


def build_tokenizer() -> Qwen2Tokenizer:
    """Build a byte-level BPE, as Qwen2's, in which the words of the tiny world are single tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    bpe.train_from_iterator([INSTRUCTION + PROMPT_WITH_SPECIAL_TOKEN, *tiny_world.SUBJECT_OF_CAPTION], trainer)
    learned = json.loads(bpe.to_str())["model"]
    merges = [tuple(merge) for merge in learned["merges"]]
    tokenizer = Qwen2Tokenizer(vocab=learned["vocab"], merges=merges)
    tokenizer.add_special_tokens({"extra_special_tokens": [*CHAT_TOKENS, REWARD_TOKEN]})
    return tokenizer


def build_config(tokenizer: Qwen2Tokenizer) -> Qwen2VLConfig:
    """Return the config of a Qwen2-VL with three narrow vision layers and three narrow language layers."""
    return Qwen2VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 80,
            "intermediate_size": 160,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 1024,
            "rms_norm_eps": 1e-6,
            "initializer_range": 0.1,
            "bos_token_id": None,
            "eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"),
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 4, 4]},
        },
        vision_config={
            "depth": 3,
            "embed_dim": 64,
            "hidden_size": 80,
            "num_heads": 4,
            "mlp_ratio": 2,
            "initializer_range": 0.1,
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
    )


def learn_to_see(hpsv3: HPSv3, seed: int) -> None:
    """Train the vision tower to classify color and shape, in place of the pretraining of the real Qwen2-VL."""
    generator = torch.Generator().manual_seed(seed)
    visual = hpsv3.network.visual
    colors, names = tuple(tiny_world.COLORS), tiny_world.SHAPES
    probe = torch.nn.Linear(visual.config.hidden_size, len(colors) + len(names))
    optimizer = torch.optim.AdamW([*visual.parameters(), *probe.parameters()], lr=SIGHT_LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_share(step, SIGHT_STEPS))
    for step in range(1, SIGHT_STEPS + 1):
        subjects = [pick(tiny_world.TRAINING, generator) for _ in range(SIGHT_BATCH)]
        clips = [tiny_world.draw_clip(subject, generator) for subject in subjects]
        frames = torch.stack([frame_at(clip, uniform(-0.5, 0.5, generator)) for clip in clips])
        inputs = hpsv3.preprocessor(like_a_decoder(frames, generator), [subject.caption() for subject in subjects])
        tokens = visual(inputs.patches, grid_thw=inputs.grids).pooler_output
        logits = probe(tokens.unflatten(0, (SIGHT_BATCH, -1)).mean(1))
        color = torch.tensor([colors.index(subject.color) for subject in subjects])
        shape = torch.tensor([names.index(subject.shape) for subject in subjects])
        loss = functional.cross_entropy(logits[:, : len(colors)], color)
        loss = loss + functional.cross_entropy(logits[:, len(colors) :], shape)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(visual.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            log.info("sight, step %d of %d: loss %.4f", step, SIGHT_STEPS, loss.item())


def train(hpsv3: HPSv3, steps: int, seed: int) -> None:
    """Train by AdamW, with warmup and a cosine schedule, on newly drawn groups of the training subjects."""
    generator = torch.Generator().manual_seed(seed)
    network = hpsv3.network.eval()  # without the head's dropout: too much for a head this narrow
    optimizer = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_share(step, steps))
    losses, ordered = [], []
    for step in range(1, steps + 1):
        groups = draw_groups(tiny_world.TRAINING, GROUPS_PER_STEP, generator)
        scores = score(hpsv3, groups)
        preferred, other = pair_scores(scores, groups)
        loss = ranking_loss(preferred, other)
        optimizer.zero_grad()
        (loss + CENTRE_WEIGHT * torch.cat(scores)[:, 0].square().mean()).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        ordered.append((preferred[:, 0] > other[:, 0]).float().mean().item())
        if step % 50 == 0 or step == steps:
            mean_loss, mean_ordered = sum(losses) / len(losses), sum(ordered) / len(ordered)
            log.info("step %d of %d: loss %.4f, pairs in order %.3f", step, steps, mean_loss, mean_ordered)
            losses, ordered = [], []


def ranking_loss(preferred: Float[Tensor, "b 2"], other: Float[Tensor, "b 2"], nodes: int = 24) -> Float[Tensor, ""]:
    """Compute the uncertainty-aware ranking loss, the mean over pairs of E[-log sigmoid(z)] (HPSv3, arXiv:2508.03789).

    Each score is a Gaussian of mean mu and deviation exp(raw sigma), so z ~ N(mu_p - mu_o, var_p + var_o). The package
    draws 1000 samples of z; here the expectation is Gauss-Hermite quadrature, without noise.
    """
    points, weights = (preferred.new_tensor(values) for values in np.polynomial.hermite_e.hermegauss(nodes))
    spread = (preferred[:, 1:].exp().square() + other[:, 1:].exp().square()).sqrt()
    z = preferred[:, :1] - other[:, :1] + spread * points
    return (functional.softplus(-z) @ (weights / weights.sum())).mean()


def learning_rate_share(step: int, steps: int) -> float:
    return min(1.0, (step + 1) / WARMUP_STEPS) * (0.02 + 0.98 * (1 + math.cos(math.pi * step / steps)) / 2)


def score(hpsv3: HPSv3, groups: Sequence[Group]) -> list[Float[Tensor, "n 2"]]:
    """Return (mu, raw sigma) of every picture, by group, with their graph."""
    frames = torch.cat([group.frames for group in groups])
    captions = [group.caption for group in groups for _ in group.kinds]
    scores = hpsv3.network(hpsv3.preprocessor(frames, captions))
    return list(scores.split([len(group.kinds) for group in groups]))


def pair_scores(
    scores: Sequence[Float[Tensor, "n 2"]], groups: Sequence[Group]
) -> tuple[Float[Tensor, "p 2"], Float[Tensor, "p 2"]]:
    preferred, other = (
        torch.cat([rows[[pair[side] for pair in group.pairs]] for rows, group in zip(scores, groups, strict=True)])
        for side in (0, 1)
    )
    return preferred, other


@torch.no_grad()
def measure(hpsv3: HPSv3, subjects: Sequence[tiny_world.Subject], seed: int) -> dict[str, dict[str, float]]:
    """Measure the share of ordered pairs and the mean margin by kind of pair, and the mean mu by kind of picture."""
    generator = torch.Generator().manual_seed(seed)
    groups = draw_groups(subjects, HELD_OUT_GROUPS, generator)
    margins, means = defaultdict(list), defaultdict(list)
    for start in range(0, len(groups), GROUPS_PER_STEP):
        chunk = groups[start : start + GROUPS_PER_STEP]
        for group, rows in zip(chunk, score(hpsv3, chunk), strict=True):
            mu = rows[:, 0].tolist()
            for kind, value in zip(group.kinds, mu, strict=True):
                means[kind].append(value)
            for preferred, other in group.pairs:
                margins[f"{group.kinds[preferred]} over {group.kinds[other]}"].append(mu[preferred] - mu[other])
    every = [margin for values in margins.values() for margin in values]
    return {
        "in_order": {
            "all": share_positive(every),
            **{kind: share_positive(margins[kind]) for kind in sorted(margins)},
        },
        "mean_margin": {kind: average(margins[kind]) for kind in sorted(margins)},
        "mean_mu": {kind: average(means[kind]) for kind in sorted(means)},
    }


def average(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 3)


def share_positive(values: Sequence[float]) -> float:
    return average([float(value > 0) for value in values])


def draw_groups(subjects: Sequence[tiny_world.Subject], count: int, generator: torch.Generator) -> list[Group]:
    return [draw_group(pick(subjects, generator), generator) for _ in range(count)]


def draw_group(subject: tiny_world.Subject, generator: torch.Generator) -> Group:
    """Draw one moment of a clip: right, wrong in color, shape or both, in between, and with half and full defect."""
    clip = tiny_world.draw_clip(subject, generator)
    moment = uniform(-0.5, 0.5, generator)
    color = pick([name for name in tiny_world.COLORS if name != subject.color], generator)
    shape = pick([name for name in tiny_world.SHAPES if name != subject.shape], generator)
    right, *wrong = (
        frame_at(replace(clip, subject=shown), moment)
        for shown in (
            subject,
            replace(subject, color=color),
            replace(subject, shape=shape),
            replace(subject, color=color, shape=shape),
        )
    )
    kinds = ("wrong color", "wrong shape", "wrong color and shape")
    towards = pick(range(3), generator)
    between = torch.lerp(right, wrong[towards], uniform(0.35, 0.65, generator))
    defect = pick(DEFECT_DRAWS, generator)
    strength = uniform(0.5, 1.0, generator)
    state = generator.get_state()
    whole = DEFECTS[defect](right, strength, generator)
    half = DEFECTS[defect](right, strength / 2, torch.Generator().set_state(state))  # the same draw, half as strong
    frames = torch.stack([right, *wrong, between, half, whole])
    return Group(
        caption=subject.caption(pick(range(len(tiny_world.PHRASINGS)), generator)),
        kinds=("right", *kinds, f"half {kinds[towards]}", f"half {defect}", defect),
        frames=like_a_decoder(frames, generator),
        pairs=((0, 1), (0, 2), (0, 3), (0, 4), (0, 5), (0, 6), (1, 3), (2, 3), (4, 1 + towards), (5, 6)),
    )


def frame_at(clip: tiny_world.Clip, moment: float) -> Frame:
    """Render the frame at a position on the path, from -0.5 to 0.5."""
    along = tiny_world.DIRECTIONS[clip.subject.direction]
    x, y = (c + a * moment * clip.travel for c, a in zip(clip.centre, along, strict=True))
    return tiny_world.render([replace(clip, centre=(x, y), travel=0.0)], frames=1)[0, :, 0]


def like_a_decoder(frames: Float[Tensor, "n 3 h w"], generator: torch.Generator) -> Float[Tensor, "n 3 h w"]:
    """Add the slight blur and noise of a video VAE to most groups, the same to all pictures of a group."""
    if uniform(0, 1, generator) < 0.3:
        return frames
    soft = blur(frames, uniform(0.2, 0.9, generator))
    noise = torch.randn(frames.shape[1:], generator=generator) * uniform(0.0, 0.03, generator)
    return (soft + noise).clamp(0, 1)


def blur(frames: Float[Tensor, "*n 3 h w"], width: float) -> Float[Tensor, "*n 3 h w"]:
    """Blur by a Gaussian of this standard deviation in pixels, with repeated edges."""
    reach = math.ceil(3 * width)
    kernel = torch.exp(-0.5 * (torch.arange(-reach, reach + 1) / width).square())
    kernel = (kernel / kernel.sum()).view(1, 1, -1)
    padded = functional.pad(frames.reshape(-1, 3, *frames.shape[-2:]), (reach,) * 4, mode="replicate")
    planes = padded.flatten(0, 1)[:, None]
    planes = functional.conv2d(functional.conv2d(planes, kernel[..., None]), kernel[:, :, None])
    return planes.view(frames.shape)


def noisy(frame: Frame, strength: float, generator: torch.Generator) -> Frame:
    return (frame + 0.5 * strength * torch.randn(frame.shape, generator=generator)).clamp(0, 1)


def blurred(frame: Frame, strength: float, generator: torch.Generator) -> Frame:
    return blur(frame, 1.0 + 6.0 * strength)


def blocky(frame: Frame, strength: float, generator: torch.Generator) -> Frame:
    """Replace squares of eight pixels by other squares of the frame, those of the object more often."""
    side = tiny_world.SIZE // 8
    squares = frame.unfold(1, 8, 8).unfold(2, 8, 8).flatten(1, 2)
    on_object = (squares - ground(frame)[:, :1, :1, None]).norm(dim=0).amax((1, 2)) > 0.3
    moved = torch.rand(side * side, generator=generator) < torch.where(on_object, 0.9, 0.3) * strength
    source = torch.randint(side * side, (side * side,), generator=generator)
    squares = torch.where(moved[:, None, None], squares[:, source], squares)
    return squares.view(3, side, side, 8, 8).permute(0, 1, 3, 2, 4).reshape(frame.shape)


def coarse(frame: Frame, strength: float, generator: torch.Generator) -> Frame:
    """Blend the frame with its average over squares of sixteen pixels."""
    average_ = functional.interpolate(functional.avg_pool2d(frame[None], 16), scale_factor=16)[0]
    return torch.lerp(frame, average_, strength)


def washed_out(frame: Frame, strength: float, generator: torch.Generator) -> Frame:
    grey = uniform(0.1, 0.8, generator)
    return torch.lerp(frame, torch.full_like(frame, grey), 0.85 * strength)


def faded(frame: Frame, strength: float, generator: torch.Generator) -> Frame:
    """Fade the object into the ground."""
    return torch.lerp(frame, ground(frame), 0.95 * strength)


def erased(frame: Frame, strength: float, generator: torch.Generator) -> Frame:
    """Erase a share of the object from one side."""
    angle = uniform(0, 2 * math.pi, generator)
    grid = torch.arange(tiny_world.SIZE) + 0.5
    along = math.cos(angle) * grid[None, :] + math.sin(angle) * grid[:, None]
    weight = (frame - ground(frame)).norm(dim=0)
    order = along.flatten().argsort()
    passed = weight.flatten()[order].cumsum(0) / weight.sum()
    wiped = torch.empty_like(passed).index_copy_(0, order, passed).view_as(weight) < 0.85 * strength
    return torch.where(wiped, ground(frame), frame)


def doubled(frame: Frame, strength: float, generator: torch.Generator) -> Frame:
    """Add a second, fainter or equal object beside the first."""
    angle = uniform(0, 2 * math.pi, generator)
    shift = [round(part * uniform(14, 26, generator)) for part in (math.sin(angle), math.cos(angle))]
    return torch.lerp(frame, torch.maximum(frame, moved_by(frame, shift)), strength)


def smeared(frame: Frame, strength: float, generator: torch.Generator) -> Frame:
    """Average the frame with copies of itself along a line, like several moments at once."""
    angle = uniform(0, 2 * math.pi, generator)
    reach = 4 + 20 * strength
    shifts = [(round(math.sin(angle) * reach * k / 3), round(math.cos(angle) * reach * k / 3)) for k in range(4)]
    return torch.stack([moved_by(frame, shift) for shift in shifts]).mean(0)


def stained(frame: Frame, strength: float, generator: torch.Generator) -> Frame:
    """Add soft colored patches everywhere."""
    cells = pick((4, 8, 16), generator)
    field = torch.randn(1, 3, cells, cells, generator=generator)
    field = functional.interpolate(field, size=tiny_world.SIZE, mode="bilinear")[0]
    return (frame + 0.4 * strength * field).clamp(0, 1)


def warped(frame: Frame, strength: float, generator: torch.Generator) -> Frame:
    """Displace pixels along a smooth random field, so that outlines bend."""
    field = torch.randn(1, 2, 9, 9, generator=generator)
    field = functional.interpolate(field, size=tiny_world.SIZE, mode="bicubic")[0] * 11 * strength / tiny_world.SIZE
    grid = functional.affine_grid(torch.eye(2, 3)[None], [1, 3, tiny_world.SIZE, tiny_world.SIZE], align_corners=False)
    sampled = functional.grid_sample(
        frame[None], grid + field.movedim(0, -1)[None], padding_mode="border", align_corners=False
    )
    return sampled[0]


DEFECTS: dict[str, Callable[[Frame, float, torch.Generator], Frame]] = {
    "noisy": noisy,
    "blurred": blurred,
    "blocky": blocky,
    "coarse": coarse,
    "washed out": washed_out,
    "faded": faded,
    "erased": erased,
    "doubled": doubled,
    "smeared": smeared,
    "stained": stained,
    "warped": warped,
}
DEFECT_DRAWS = (*DEFECTS, "blocky", "erased", "doubled", "warped")  # the hardest to see twice as often


def ground(frame: Frame) -> Frame:
    return torch.tensor(tiny_world.BACKGROUND).view(3, 1, 1).expand_as(frame)


def moved_by(frame: Frame, shift: Sequence[int]) -> Frame:
    """Shift a frame by (rows, columns); the ground enters at the edges."""
    down, across = shift
    size = tiny_world.SIZE
    moved = ground(frame).clone()
    moved[:, max(down, 0) : size + min(down, 0), max(across, 0) : size + min(across, 0)] = frame[
        :, max(-down, 0) : size + min(-down, 0), max(-across, 0) : size + min(-across, 0)
    ]
    return moved


def pick(options: Sequence[T], generator: torch.Generator) -> T:
    return options[int(torch.randint(len(options), (), generator=generator))]


def uniform(low: float, high: float, generator: torch.Generator) -> float:
    return low + (high - low) * float(torch.rand((), generator=generator))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    tyro.cli(main)
