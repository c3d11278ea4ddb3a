"""The command export: it writes a role's weights as a diffusers pipeline folder."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from peft import PeftModel
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor

from unified_trainer import config as settings
from unified_trainer.commands.import_hpsv3 import link_or_copy
from unified_trainer.commands.load_run import LoadedRole, load_role
from unified_trainer.commands.scheduler import euler_scheduler
from unified_trainer.errors import OutputExistsError, UserError
from unified_trainer.models.base import Family, VideoModel
from unified_trainer.models.folder import read_json
from unified_trainer.numerics.flow import GuidanceScale
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.registry import DTYPES

ABOUT = "unified_trainer.json"
MERGED, WRITTEN = 1e-3, 1e-5  # largest change of the example's velocity, relative to its largest value
INDEX = "model_index.json"


class ExportError(UserError, RuntimeError):
    """The exported weights differ from the run's; the message says by how much."""


def export(
    run: Annotated[str, tyro.conf.Positional],
    out: Annotated[Path, tyro.conf.Positional],
    role: str = "student",
    dtype: Literal["fp32", "bf16"] = "fp32",
    adapter: Literal["merge", "peft", "published"] = "merge",
    components: Literal["link", "copy", "none"] = "link",
    max_shard_size: str = "10GB",
    base: Path | None = None,
) -> None:
    """Write a role's weights as a folder that diffusers loads, and check them by loading them again.

    Args:
        run: RUN[@step][:ema], a run directory: its newest checkpoint or that step's; with :ema the EMA weights.
        out: Folder to write; it must be empty or absent.
        role: Role whose weights are written.
        dtype: Precision of the written weights.
        adapter: Merge an adapter into the weights, or write it alone: in peft's layout (peft), or by the names of the
            family's published adapters (published), of two experts one file each.
        components: Text encoder, VAE and the rest of the base: hard links (copies across file systems), copies, or
            none.
        max_shard_size: Largest size of one file of weights.
        base: Pipeline folder that the role started from, if it is no longer where the run found it.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise OutputExistsError(f"{out} exists and is not an empty folder; choose another one or remove it")
    loaded = load_role(run, role, base, Mesh(torch.device("cpu")), causal=False)
    if adapter != "merge" and not loaded.role.config.adapter.rank:
        raise UserError(f"--adapter {adapter}: {run} trained all weights of {role}; leave it out")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        folder = Path(scratch) / out.name
        folder.mkdir()
        if adapter == "peft":
            _write_adapters(loaded, folder)
        elif adapter == "published":
            _write_published(loaded, folder)
        else:
            _write_network(loaded, folder, DTYPES[dtype], max_shard_size)
            _write_components(loaded, folder, components)
        about = _about(loaded, role, run)
        (folder / ABOUT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        folder.chmod(0o755)
        folder.replace(out)
    Console().print(f"{out}: {loaded.said}. {about['how']}", highlight=False, markup=False, soft_wrap=True)


def _write_network(loaded: LoadedRole, folder: Path, dtype: torch.dtype, max_shard_size: str) -> None:
    """Write the network or both experts with adapters merged; raise ExportError unless they read back unchanged."""
    before = {}
    for expert in loaded.role.experts:
        with loaded.role.running(expert) as model:
            before[expert] = _velocity(model)
    loaded.role.merge()
    for expert, component in loaded.components.items():
        with loaded.role.running(expert) as model:
            _must_agree(_velocity(model), before[expert], MERGED, f"{loaded.said}: with its adapter merged")
            model.save(folder, component, dtype, max_shard_size)
            again = _read(loaded.family, folder, component)
            read = again.network.state_dict()
            for key, weight in model.network.state_dict().items():
                if not torch.equal(read[key], weight):
                    raise ExportError(f"{loaded.said}: {key} is not written as it is in memory; check the disk")
            _must_agree(_velocity(again), _velocity(model), WRITTEN, f"{loaded.said}: {component} read again")


def _write_adapters(loaded: LoadedRole, folder: Path) -> None:
    """Write the adapter in peft's layout, those of two experts in a folder each."""
    for expert in loaded.layout.trained:
        own = folder / loaded.components[expert] if expert else folder
        with loaded.role.running(expert) as model:
            before = _velocity(model)
        loaded.role.save_adapter(expert, own)
        again = _read(loaded.family, loaded.base, loaded.layout.components[expert])
        PeftModel.from_pretrained(again.network, own)
        _must_agree(_velocity(again), before, WRITTEN, f"{loaded.said}: the adapter read again")


def _write_published(loaded: LoadedRole, folder: Path) -> None:
    """Write the adapter by the names of the family's published ones, those of two experts in a file each."""
    names = dict(zip(("high", "low"), loaded.family.adapter_files, strict=True)) | {"": "model"}
    for expert in loaded.layout.trained:
        named = loaded.family.published_adapter(*loaded.role.adapter(expert))
        save_file(named, folder / f"{names[expert]}.safetensors", metadata={"format": "pt"})


def _read(family: Family, folder: Path, component: str) -> VideoModel:
    model = family.model(folder, component)
    model.read(Mesh(torch.device("cpu")))
    return model


@torch.no_grad()
def _velocity(model: VideoModel) -> Tensor:
    return model.velocity(*model.example())


def _must_agree(velocity: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    off = float((velocity - expected).abs().max() / expected.abs().max())
    if not off <= tolerance:
        raise ExportError(f"{what}, the network's output is off by {off:.1e} of its largest value")


def _write_components(loaded: LoadedRole, folder: Path, how: Literal["link", "copy", "none"]) -> None:
    """Write the rest of the pipeline, with the run's own scheduler where diffusers has one."""
    index = read_json(loaded.base / INDEX)
    scheduler = euler_scheduler(loaded.run.sampler)
    if scheduler is not None:
        scheduler.save_pretrained(folder / "scheduler")
        index["scheduler"] = ["diffusers", type(scheduler).__name__]
    if loaded.layout.boundary is not None:
        high, low = loaded.family.experts
        index |= {low: index[high], "boundary_ratio": loaded.layout.boundary}
    if how == "none":
        return
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    present = [name for name, entry in index.items() if isinstance(entry, list) and entry[0] is not None]
    place = link_or_copy if how == "link" else shutil.copyfile
    for name in present:
        if not (folder / name).exists():
            shutil.copytree(loaded.base / name, folder / name, copy_function=lambda a, b: place(Path(a), Path(b)))


def _about(loaded: LoadedRole, role: str, spec: str) -> dict[str, Any]:
    """Say where the folder comes from, and how diffusers samples as the run does."""
    sampler = loaded.run.sampler
    if euler_scheduler(sampler) is None:
        how = f"diffusers has no scheduler for its sampler: `python -m unified_trainer sample {spec}` has"
    else:
        how = f"Sample with num_inference_steps={sampler.num_steps}, {_guidance(sampler.guidance_scale)}"
    return {
        "role": role,
        "from": spec,
        "step": loaded.metadata["step"],
        "method": loaded.metadata["method"],
        "boundary": loaded.layout.boundary,
        "sampler": settings.plain(loaded.run)["sampler"],
        "how": how,
    }


def _guidance(scale: GuidanceScale) -> str:
    """Write a guidance scale as arguments of a diffusers pipeline."""
    high, low = scale if isinstance(scale, tuple) else (scale, None)
    return f"guidance_scale={high}" + ("" if low is None else f", guidance_scale_2={low}")
