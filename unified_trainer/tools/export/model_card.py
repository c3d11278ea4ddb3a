"""The model card of an export: what was trained, how good its last validation was, and how to sample with it."""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from unified_trainer.basics.versions import version_of
from unified_trainer.run.checkpoint.manifest import Spec, folders, step_of
from unified_trainer.run.registry import method_named
from unified_trainer.run.settings.config import RunConfig
from unified_trainer.run.tracking.metrics_file import VALIDATION, row_of
from unified_trainer.tools.export.scheduler import SAMPLER
from unified_trainer.tools.load_run import LoadedRole

PROMPT = "a red circle moving left"  # of the example
CLIP = "condition.mp4"  # of the example, of a student that needs one
IMAGE = "first_frame.png"  # of the example, of a student that needs one
DIFFUSERS = "diffusers"
OLDEST = "0.35"  # of diffusers, on which pipeline.py runs
CARD, SHEET = "README.md", "contact_sheet.png"
DTYPES = {"fp32": "torch.float32", "bf16": "torch.bfloat16"}
SEEDS = """and makes the videos that `python -m unified_trainer sample RUN --seed 0` makes of the run. There, prompt i
of several has the seed 0 + i: a list of prompts needs a list of generators."""
SNAPSHOT = re.compile(r"models--([^/]+)--([^/]+)/snapshots/[^/]+$")  # of a model in the cache of the hub


class AdapterFile(NamedTuple):
    """A file of an adapter that `load_lora_weights` reads, and the component of the pipeline that it is for."""

    component: str
    file: str


def write_model_card(
    loaded: LoadedRole, spec: Spec, folder: Path, name: str, dtype: str, layout: str, adapters: Sequence[AdapterFile]
) -> None:
    """Write README.md into an export, with front matter for the hub, and the contact sheet of the last validation.

    `spec` and `name` are the run's and the export's; `adapters` is empty where whole weights were written, in `dtype`.
    The card holds no path of this machine.
    """
    base, hub_name = base_of(loaded.base)
    method = _last_name(loaded.run.method)
    makes = "image" if loaded.run.video.frames == 1 else "video"
    task = f"{'image' if _needs_image(loaded) else 'text'}-to-{makes}"
    front: dict[str, Any] = {"pipeline_tag": task} | ({"library_name": layout} if layout == DIFFUSERS else {})
    if hub_name:
        front |= {"base_model": base, "base_model_relation": "adapter" if adapters else "finetune"}
    front["tags"] = ["unified-trainer", method, *(["lora"] if adapters else [])]
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---",
        f"# {name}",
        _table(_facts(loaded, spec, base, method, dtype)),
    ]
    step, metrics, sheet = _validation(spec.run, loaded.metadata["step"])
    if metrics and loaded.role.name == "student":
        parts.append(f"## Validation after step {step}")
        if sheet is not None:
            shutil.copyfile(sheet, folder / SHEET)
            parts.append(f"![frames of the validation's first samples]({SHEET})")
        parts.append(_table({key: f"{value:.4g}" for key, value in metrics.items()}))
    if loaded.family.exported_pipeline is not None and layout == DIFFUSERS:
        runs = f"runs on diffusers {OLDEST} to {version_of(DIFFUSERS)} and Python 3.10 or newer"
        says = f"`{name}` is this folder, or its name on the hub. `pipeline.py` {runs}. It reads `{SAMPLER}`\n{SEEDS}"
        parts += ["## Sample", says, f"```python\n{sample_code(loaded, name, base, dtype, adapters)}\n```"]
    (folder / CARD).write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def sample_code(loaded: LoadedRole, name: str, base: str, dtype: str, adapters: Sequence[AdapterFile]) -> str:
    """Return Python code that samples with the export `name` as `sample --seed 0` does."""
    networks = list(loaded.components.values())
    config = loaded.run.encoders.on(loaded.role.device.type)
    encoders = {"text_encoder": config.text_precision, "vae": config.vae_precision}
    half = [part for part, kind in encoders.items() if kind == "bf16"]
    half += networks if dtype == "bf16" and not adapters else []
    precisions = {"default": "fp32"} | dict.fromkeys(half, "bf16")
    given = ", ".join(f'"{part}": {DTYPES[kind]}' for part, kind in precisions.items())
    given = f"{{{given}}}" if half else DTYPES["fp32"]
    first = f'"{base}", custom_pipeline="{name}"' if adapters else f'"{name}", custom_pipeline="pipeline"'
    imports, lines = ["import torch"], []
    lines += ["pipe = DiffusionPipeline.from_pretrained(", f"    {first},", f"    torch_dtype={given},"]
    lines += ["    trust_remote_code=True,", ")"]
    if adapters and len(networks) > len(set(loaded.layout.components.values())):  # two experts of one network
        imports = ["import copy", "", *imports]
        lines.append(f"pipe.register_modules({networks[1]}=copy.deepcopy(pipe.{networks[0]}))")
    for component, file in adapters:
        path, _, weight_name = file.rpartition("/")
        subfolder = f', subfolder="{path}"' if path else ""
        second = ", load_into_transformer_2=True" if component == networks[-1] != networks[0] else ""
        lines.append(f'pipe.load_lora_weights("{name}"{subfolder}, weight_name="{weight_name}"{second})')
    if adapters:
        lines.append(f'pipe.load_sampler("{name}")')
    lines.append("generator = torch.Generator().manual_seed(0)")
    imports.append("from diffusers import DiffusionPipeline")
    image = ""
    if _needs_image(loaded):
        clips = loaded.family.clips(loaded.base)
        imports.append(f"from diffusers.utils import load_{'video' if clips else 'image'}")
        image = f', {clips[0]}=load_video("{CLIP}")' if clips else f', image=load_image("{IMAGE}")'
    lines.append(f'frames = pipe("{PROMPT}"{image}, generator=generator).frames[0]')
    return "\n".join([*imports, "", *lines])


def _needs_image(loaded: LoadedRole) -> bool:
    return loaded.family.images(loaded.base)[0] > 0


def base_of(folder: Path) -> tuple[str, bool]:
    """Return the name of a base model, and whether it is one on the hub: then it was read from the hub's cache."""
    snapshot = SNAPSHOT.search(folder.as_posix())
    return ("/".join(snapshot.groups()), True) if snapshot else (folder.resolve().name, False)


def _facts(loaded: LoadedRole, spec: Spec, base: str, method: str, dtype: str) -> dict[str, str]:
    run, adapter, video = loaded.run, loaded.role.config.adapter, loaded.run.video
    sampler, levels = run.sampler, ", ".join(f"{level:.3g}" for level in run.sampler.sigmas()[:-1].tolist())
    weights = (
        f"adapter of rank {adapter.rank}, alpha {adapter.alpha or adapter.rank:g}" if adapter.rank else "all trained"
    )
    chunks = f", {sampler.chunks.chunk_frames} latent frames at a time" if sampler.chunks.causal else ""
    merged = " + ".join(Path(text).name for text in loaded.role.config.adapters or (adapter.path,))
    facts = {
        "base model": base + (f", with {merged} merged into it" if adapter.merge else ""),
        "method": f"{method}, step {loaded.metadata['step']}",
        "recipe": run.recipe,
        "weights": f"{loaded.role.name}{' (EMA)' * spec.ema}, {weights}, {dtype}",
        "sampler": f"{sampler.solver}, {sampler.num_steps} steps at noise levels {levels}{chunks}",
        "guidance scale": str(sampler.guidance_scale),
        "images": f"{video.width} x {video.height} pixels" if video.frames == 1 else "",
        "videos": f"{video.frames} frames of {video.width} x {video.height} pixels, {video.fps:g} per second"
        if video.frames > 1
        else "",
        "reward": _reward(run),
    }
    return {key: value for key, value in facts.items() if value}


def _reward(run: RunConfig) -> str:
    """Return the scorers of a run; "" if nothing was scored."""
    learns = method_named(run.method).uses_reward
    scorers = [
        f"{name} ({'' if scorer.kind == name else _last_name(scorer.kind) + ', '}"
        + (f"weight {scorer.weight:g})" if scorer.weight else "held out)")
        for name, scorer in run.reward.named().items()
    ]
    if not scorers or not (learns or run.validate_every):
        return ""
    return ("" if learns else "measured only: ") + ", ".join(scorers)


def _validation(run: Path, step: int) -> tuple[int, dict[str, float], Path | None]:
    """Return step, metrics and contact sheet of the last validation up to a step; no metrics if there was none."""
    newest: tuple[int, dict[str, float]] = (0, {})
    if (run / "metrics.jsonl").is_file():
        rows = [row_of(line) or {} for line in (run / "metrics.jsonl").read_bytes().splitlines()]  # or damaged
        for row in rows:
            numbers = {key: v for key, v in row.items() if isinstance(v, int | float)}
            metrics = {key.removeprefix(VALIDATION): v for key, v in numbers.items() if key.startswith(VALIDATION)}
            newest = (row["step"], metrics) if metrics and row["step"] <= step else newest
    sheets = [
        path / SHEET for path in folders(run / "validation") if step_of(path) == newest[0] and (path / SHEET).is_file()
    ]
    return *newest, sheets[0] if sheets else None


def _last_name(text: str) -> str:
    """Return the last part of a path; other names have one part."""
    return text.rpartition("/")[2]


def _table(rows: dict[str, str]) -> str:
    return "\n".join(["| | |", "| --- | --- |", *(f"| {key} | {value} |" for key, value in rows.items())])
