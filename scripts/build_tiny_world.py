"""This script builds the embedded tiny world: tokenizer, text encoder, VAE, transformer, HPSv3 and measurements.

    python scripts/build_tiny_world.py --out unified_trainer/assets/tiny

A stage is skipped when its output exists; delete an output to build it again.
"""

import json
import logging
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tiny_world_features
import tiny_world_hpsv3
import tiny_world_vae
import torch
import tyro
import yaml
from diffusers import UniPCMultistepScheduler, WanTransformer3DModel
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from unified_trainer.basics.requests import Request
from unified_trainer.data.loader import make_batch
from unified_trainer.data.tiny_world import FRAMES, HELD_OUT, PHRASINGS, SIZE, SUBJECTS, check_attributes
from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.models.wan.codec import WanCodec
from unified_trainer.models.wan.model import WanModel
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.role import Frozen, RoleConfig
from unified_trainer.run.checkpoint import dcp, manifest
from unified_trainer.run.registry import TINY
from unified_trainer.sampling.solver import SamplerConfig, generate

log = logging.getLogger(__name__)

REPORT = "measured.json"  # measurements of each stage
BASE_REPORT = "base.json"  # accuracy of the finished base model

TEXT_TOKENS = 16  # of every prompt, padding included; the longest caption has 9 words
TEXT_WIDTH = 32
TRANSFORMER = {
    "patch_size": (1, 1, 1),
    "num_attention_heads": 4,
    "attention_head_dim": 24,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": TEXT_WIDTH,
    "freq_dim": 64,
    "ffn_dim": 288,
    "num_layers": 5,
    "rope_max_seq_len": 64,
}


def build_tokenizer(folder: Path, captions: Iterable[str]) -> None:
    """Build a tokenizer with one token for each word of the captions, and </s> at the end as in T5."""
    words = sorted({word for caption in captions for word in caption.replace(",", " , ").split()})
    vocabulary = {token: i for i, token in enumerate(["<pad>", "</s>", "<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=TEXT_TOKENS,
    ).save_pretrained(folder)


def build_text_encoder(folder: Path, seed: int) -> None:
    """Build a UMT5 encoder with random weights, which distinguish words and their order; it stays frozen."""
    torch.manual_seed(seed)
    config = UMT5Config(
        vocab_size=len(AutoTokenizer.from_pretrained(folder.parent / "tokenizer")),
        d_model=TEXT_WIDTH,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        relative_attention_num_buckets=16,
        feed_forward_proj="gated-gelu",
        pad_token_id=0,
        eos_token_id=1,
    )
    UMT5EncoderModel(config).eval().save_pretrained(folder)


def build_transformer(folder: Path, seed: int, config: Mapping[str, Any] = TRANSFORMER) -> None:
    """Build the untrained transformer; gates that start at 1 let a small model learn from the first step."""
    torch.manual_seed(seed)
    network = WanTransformer3DModel(**config)
    with torch.no_grad():
        for block in network.blocks:
            block.scale_shift_table[:, [2, 5]] += 1.0
    network.save_pretrained(folder)


def finetune(start: Path, run: Path, out: Path, seed: int, flags: Sequence[str], where: Path | None = None) -> None:
    """Train the transformer of the folder `start` with the method finetune; write its EMA weights to `out`.

    `flags` name the recipe, and `where` is the folder that it is run in.
    """
    command = [sys.executable, "-m", "unified_trainer"]
    if (run / "config.yaml").is_file():
        command += ["--resume", str(run)]
    else:
        command += ["--method", "finetune", *flags, "--output", str(run), "--seed", str(seed)]
        command += ["--student.path", str(start)]
    subprocess.run(command, check=True, cwd=where)
    network = WanTransformer3DModel.from_pretrained(start / "transformer")
    weights = {f"student/ema/{key}": p.data for key, p in network.named_parameters()}
    newest, metadata = manifest.find(run)
    if metadata["step"] < yaml.safe_load((run / "config.yaml").read_text())["steps"]:
        raise SystemExit(f"{run} was stopped at step {metadata['step']}; run this script again to continue")
    dcp.load(newest, weights, Mesh(torch.device("cpu")))
    network.register_to_config(_name_or_path="")
    network.save_pretrained(out)


def write_index(folder: Path) -> None:
    """Write the files that make the parts a WanPipeline folder."""
    UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=3.0
    ).save_pretrained(folder / "scheduler")
    index = {
        "_class_name": "WanPipeline",
        "_diffusers_version": "0.42.1",
        "boundary_ratio": None,
        "expand_timesteps": False,
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "transformer_2": [None, None],
        "vae": ["diffusers", "AutoencoderKLWan"],
    }
    (folder / "model_index.json").write_text(json.dumps(index, indent=2))


@torch.no_grad()
def measure_base(wan: Path, seed: int) -> dict[str, float]:
    """Measure the base model's accuracy on all 48 subjects: guided, and with the sampler of the default GRPO run."""
    device = torch.device("cpu")
    codec = WanCodec.load(wan, device, EncoderConfig())
    student = Frozen("base", Backbone(WanModel.open(wan, "transformer"), Mesh(device)), RoleConfig())
    subjects = [subject for subject in SUBJECTS for _ in range(4)]
    samples = list(range(len(subjects)))
    shape = codec.latent_shape(FRAMES, SIZE, SIZE)
    captions = [subject.caption(i % len(PHRASINGS)) for i, subject in enumerate(subjects)]
    noise = Streams(seed, 0).noise("measure", samples, shape)

    def no_draw(step: int) -> torch.Tensor:
        raise RuntimeError("these samplers draw no noise")

    measured = {}
    for name, sampler in {
        "guided": SamplerConfig(num_steps=30, shift=3.0, guidance_scale=3.0),
        "unguided_2_steps": SamplerConfig(num_steps=2, shift=3.0, guidance_scale=1.0),
    }.items():
        hits: dict[str, list[torch.Tensor]] = {}
        for start in range(0, len(samples), 48):
            part = slice(start, start + 48)
            rows = samples[part]
            batch = make_batch(codec, Request.of(captions[part]), "", shape, prompt_ids=rows, sample_ids=rows)
            video = codec.decode(generate(student, noise[part], batch, sampler, no_draw))
            for key, right in check_attributes(video, subjects[part]).items():
                hits.setdefault(key, []).append(right)
        rows = {key: torch.cat(parts).float() for key, parts in hits.items()}
        held_out = torch.tensor([subject in HELD_OUT for subject in subjects])
        every = rows.pop("all")
        measured[f"{name}/accuracy"] = every.mean().item()
        measured |= {f"{name}/accuracy/{key}": right.mean().item() for key, right in rows.items()}
        measured[f"{name}/accuracy_of_held_out_subjects"] = every[held_out].mean().item()
    return measured


def main(out: Path = TINY, work: Path = Path("runs/tiny-world"), seed: int = 0) -> None:
    """Build what is missing of the tiny world.

    Args:
        out: folder of the world: `wan`, `hpsv3` and the measurements
        work: folder of the base model's training, which resumes
        seed: seed of all random numbers
    """
    wan, start = out / "wan", work / "start"

    def stage(made: Path, build: Callable[[], dict[str, float] | None]) -> None:
        if made.exists():
            log.info("%s exists", made)
            return
        began = time.monotonic()
        measured = (build() or {}) | {"seconds": time.monotonic() - began}
        log.info("%s: %s", made, measured)
        report = json.loads((out / REPORT).read_text()) if (out / REPORT).exists() else {}
        (out / REPORT).write_text(json.dumps(report | {str(made.relative_to(out)): measured}, indent=1) + "\n")

    def transformer() -> None:
        if not start.exists():
            shutil.copytree(wan, start)
            build_transformer(start / "transformer", seed)
        finetune(start, work / "finetune", wan / "transformer", seed, ["--recipe", "tiny-base"])

    out.mkdir(parents=True, exist_ok=True)
    captions = [subject.caption(i) for subject in SUBJECTS for i in range(len(PHRASINGS))]
    stage(wan / "tokenizer", lambda: build_tokenizer(wan / "tokenizer", captions))
    stage(wan / "text_encoder", lambda: build_text_encoder(wan / "text_encoder", seed))
    stage(wan / "vae", lambda: tiny_world_vae.main(wan / "vae", seed=seed))
    stage(wan / "model_index.json", lambda: write_index(wan))
    stage(out / "hpsv3", lambda: tiny_world_hpsv3.main(out / "hpsv3", seed=seed))
    stage(wan / "transformer", transformer)
    stage(
        out / "features.safetensors",
        lambda: tiny_world_features.main(out / "features.safetensors", str(wan), seed=seed),
    )
    (out / BASE_REPORT).write_text(json.dumps(measure_base(wan, seed + 10_000), indent=1) + "\n")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    tyro.cli(main)
