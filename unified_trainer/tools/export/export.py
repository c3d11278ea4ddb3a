"""The command export: it writes a role's weights as a diffusers pipeline folder."""

import importlib.util
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.input_files import read_json
from unified_trainer.basics.suggestions import must_know
from unified_trainer.basics.terminal import say
from unified_trainer.basics.types import DTYPES
from unified_trainer.basics.versions import install
from unified_trainer.models.adapter_file import diffusers_adapter
from unified_trainer.models.base import VideoModel, name_in
from unified_trainer.models.folder import WEIGHTS
from unified_trainer.models.tensor_file import write_tensors
from unified_trainer.parallel.device import has_products, pick_device
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.roles.role import Quantize
from unified_trainer.run.checkpoint.manifest import Spec
from unified_trainer.run.settings import config as settings
from unified_trainer.tools.export.model_card import DIFFUSERS, AdapterFile, write_model_card
from unified_trainer.tools.export.scheduler import SAMPLER, euler_scheduler, sampler_file
from unified_trainer.tools.load_run import LoadedRole, load_role
from unified_trainer.tools.output_folder import check_empty, link_or_copy, new_folder

ABOUT = "unified_trainer.json"
MERGED, WRITTEN = 1e-3, 1e-5  # largest change of the example's velocity, relative to its largest value
INDEX = "model_index.json"
PIPELINE = "pipeline.py"  # the name that diffusers looks for
LORA = "pytorch_lora_weights.safetensors"  # the name that load_lora_weights looks for


class ExportError(UserError, RuntimeError):
    """The exported weights differ from the run's; the message says by how much."""


def export(
    run: Annotated[str, tyro.conf.Positional],
    out: Annotated[Path, tyro.conf.Positional],
    role: str = "student",
    dtype: Literal["fp32", "bf16"] = "fp32",
    adapter: Literal["merge", "peft", "published"] = "merge",
    components: Literal["link", "copy", "none"] = "link",
    layout: str = DIFFUSERS,
    quantize: Quantize = "none",
    base: Path | None = None,
    families: tuple[str, ...] = (),
) -> None:
    """Write a role's weights as a folder that diffusers loads, and check them by loading them again.

    The folder's pipeline.py makes the videos of `sample`; its README.md is a model card that shows how to run it.

    Args:
        run: RUN[@step][:ema], a run directory: its newest checkpoint or that step's; with :ema the EMA weights.
        out: Folder to write; it must be empty or absent.
        role: Role whose weights are written.
        dtype: Precision of the written weights.
        adapter: Merge an adapter into the weights, or write it alone: in the layouts of peft and of diffusers, of two
            experts one folder each (peft), or by the names of the family's published adapters, of two experts one file
            each (published).
        components: Text encoder, VAE and the rest of the base: hard links (copies across file systems), copies, or
            none.
        layout: With `wan`, the network alone is written, in one file by Wan's own names, as ComfyUI and Wan's code read
            it; of two experts in a folder each. With --adapter published it is the adapter.
        quantize: Write the linear layers of the blocks in so few bits, as diffusers reads them with torchao.
        base: Pipeline folder that the role started from, if it is no longer where the run found it.
        families: Model families of your own, in place of those of the run.
    """
    check_empty(out)
    if quantize != "none":
        _check_quantize(quantize, adapter, layout)
    loaded = load_role(run, role, base, Mesh(torch.device("cpu")), causal=False, families=families)
    if adapter != "merge" and not loaded.role.config.adapter.rank:
        raise UserError(f"--adapter {adapter}: {run} trained all weights of {role}; leave it out")
    own_layers = loaded.role.config.is_flow_map or loaded.role.config.sparse.share
    if quantize != "none" and own_layers:
        raise UserError(
            f"--quantize {quantize}: {role} of {run} is a flow map or has sparse attention, and diffusers would drop "
            "its own layers in silence: leave --quantize out"
        )
    must_know("--layout", layout, [DIFFUSERS, *(loaded.family.native or ())[:1]])
    if adapter == "peft" and layout != DIFFUSERS:
        raise UserError(f"--adapter peft is for diffusers and peft: with --layout {layout}, take --adapter published")
    if loaded.actions and (quantize != "none" or adapter != "merge" or layout != DIFFUSERS):
        raise UserError(
            f"{run} takes actions, and is written whole in the layout of diffusers: leave --quantize, --adapter and "
            "--layout out"
        )
    with new_folder(out) as folder:
        adapters = []
        if adapter == "peft":
            adapters = _write_adapters(loaded, folder)
        elif adapter == "published":
            adapters = _write_published(loaded, folder)
        else:
            _write_network(loaded, folder, DTYPES[dtype])
            if quantize != "none":
                _quantise(loaded, folder, quantize, DTYPES[dtype])
        if layout == DIFFUSERS:
            _write_scheduler(loaded, folder)
            _write_guider(loaded, folder)
            if adapter == "merge":
                _write_components(loaded, folder, components)
            _write_sampler(loaded, folder)
        elif adapter == "merge":
            _write_native(loaded, folder)
        about = _about(loaded, role, run, layout) | ({"quantize": quantize} if quantize != "none" else {})
        (folder / ABOUT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        write_model_card(loaded, Spec.of(run), folder, out.name, dtype, layout, adapters)
    say(f"{out}: {loaded.said}. {about['how']}")


def _write_network(loaded: LoadedRole, folder: Path, dtype: torch.dtype) -> None:
    """Write the network or both experts with adapters merged; raise ExportError unless they read back unchanged."""
    before = {}
    for expert in loaded.role.experts:
        with loaded.role.running(expert) as model:
            before[expert] = _velocity(model)
    loaded.role.merge()
    for expert, component in loaded.components.items():
        with loaded.role.running(expert) as model:
            _must_agree(_velocity(model), before[expert], MERGED, f"{loaded.said}: with its adapter merged")
            model.save(folder, component, dtype)
            again = _read(loaded, folder, component)
            read = again.network.state_dict()
            for key, weight in model.network.state_dict().items():
                if not torch.equal(read[key], weight):
                    raise ExportError(f"{loaded.said}: {key} is not written as it is in memory; check the disk")
            _must_agree(_velocity(again), _velocity(model), WRITTEN, f"{loaded.said}: {component} read again")


def _check_quantize(kind: Quantize, adapter: str, layout: str) -> None:
    if adapter != "merge" or layout != DIFFUSERS:
        raise UserError(f"--quantize {kind} is for whole networks in the layout of diffusers: leave the other flag out")
    if importlib.util.find_spec("torchao") is None:
        raise UserError(f"--quantize needs torchao: {install('quantize')}")
    device = pick_device("auto", 0)
    if not has_products(kind, device):
        raise UserError(f"--quantize {kind} is written on a device that computes in it, and {device.type} does not")


def _quantise(loaded: LoadedRole, folder: Path, kind: Quantize, dtype: torch.dtype) -> None:
    """Write networks that were written and read back once more, with few bits."""
    from unified_trainer.models.quantize import check_sizes, linear_layers, quantise_folder

    for component in loaded.components.values():
        model = _read(loaded, folder, component)
        check_sizes(model, kind, "--quantize")
        network = type(model.network).from_pretrained(folder / component, torch_dtype=dtype)
        quantise_folder(network, linear_layers(model), folder / component, kind)


def _write_adapters(loaded: LoadedRole, folder: Path) -> list[AdapterFile]:
    """Write the adapter in peft's layout and in that of diffusers, those of two experts in a folder each."""
    written = []
    for expert in loaded.layout.trained:
        component = loaded.components[expert]
        own = folder / component if expert else folder
        with loaded.role.running(expert) as model:
            before = _velocity(model)
        loaded.role.save_adapter(expert, own)
        again = _read(loaded, loaded.base, loaded.layout.components[expert])
        PeftModel.from_pretrained(again.network, own, local_files_only=True)  # a folder that was just written
        _must_agree(_velocity(again), before, WRITTEN, f"{loaded.said}: the adapter read again")
        write_tensors(own / LORA, diffusers_adapter(*loaded.role.adapter(expert)), {"format": "pt"})
        written.append(AdapterFile(component, str((own / LORA).relative_to(folder))))
    return written


def _write_published(loaded: LoadedRole, folder: Path) -> list[AdapterFile]:
    """Write the adapter by the names of the family's published ones, those of two experts in a file each."""
    names = dict(zip(("high", "low"), loaded.family.adapter_files, strict=True)) | {"": "model"}
    written = []
    for expert in loaded.layout.trained:
        named = loaded.family.published_adapter(*loaded.role.adapter(expert))
        file = f"{names[expert]}.safetensors"
        write_tensors(folder / file, named, {"format": "pt"})
        written.append(AdapterFile(loaded.components[expert], file))
    return written


def _write_native(loaded: LoadedRole, folder: Path) -> None:
    """Replace the written networks by one file each, in the family's own layout; those of two experts in folders."""
    assert loaded.family.native is not None  # its name is known
    places = loaded.family.adapter_files if loaded.layout.boundary is not None else ("",)
    for component, place in zip(loaded.components.values(), places, strict=True):
        weights = {key: w for file in (folder / component).glob("*.safetensors") for key, w in load_file(file).items()}
        names = {key: name_in(key, loaded.family.published_layer) for key in weights}
        if unnamed := [key for key, name in names.items() if name is None]:
            raise UserError(f"--layout {loaded.family.native[0]} has no name for {unnamed[0]}: leave --layout out")
        (folder / place).mkdir(exist_ok=True)
        write_tensors(folder / place / f"{WEIGHTS}.safetensors", {str(names[key]): w for key, w in weights.items()})
        config = loaded.family.native[1](folder / component, loaded.base)
        (folder / place / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        shutil.rmtree(folder / component)


def _write_scheduler(loaded: LoadedRole, folder: Path) -> None:
    """Write the run's own scheduler, where diffusers has one."""
    scheduler = euler_scheduler(loaded.run.sampler, given=loaded.family.given_levels(loaded.base))
    if scheduler is not None:
        scheduler.save_pretrained(folder / "scheduler")


def _write_guider(loaded: LoadedRole, folder: Path) -> None:
    """Write the run's guidance, where a component of the pipeline has it."""
    if guider := loaded.family.guider:
        config = read_json(loaded.base / guider)
        config |= {"guidance_scale": loaded.run.sampler.guidance_scale, "enabled": True}
        (folder / guider).parent.mkdir()
        (folder / guider).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_sampler(loaded: LoadedRole, folder: Path) -> None:
    """Write the family's pipeline, if it has one, and the sampler that it reads."""
    if loaded.family.exported_pipeline is None:
        return
    shutil.copyfile(loaded.family.exported_pipeline, folder / PIPELINE)
    (folder / SAMPLER).parent.mkdir(exist_ok=True)
    (folder / SAMPLER).unlink(missing_ok=True)  # a base that is an export has one, and this may be a link to it
    size = loaded.actions.size if loaded.actions else 0
    content = sampler_file(loaded.run, loaded.role.config, loaded.layout.boundary, size)
    (folder / SAMPLER).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _read(loaded: LoadedRole, folder: Path, component: str) -> VideoModel:
    sparse, family = loaded.role.config.sparse, loaded.family
    model: VideoModel
    if loaded.role.config.is_flow_map and family.flow_map is not None:
        model = family.flow_map(folder, component)
    elif sparse.share and family.sparse is not None:
        model = family.sparse(folder, component, sparse, False)
    else:
        model = family.model(folder, component)
    model.read(Mesh(torch.device("cpu")))
    return model


@torch.autocast("cpu", enabled=False)  # of a role with passes in bf16, whose rounding is larger than what is looked for
@torch.no_grad()
def _velocity(model: VideoModel) -> Tensor:
    return model.velocity(*model.example())


def _must_agree(velocity: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    off = float((velocity - expected).abs().max() / expected.abs().max())
    if not off <= tolerance:
        raise ExportError(f"{what}, the network's output is off by {off:.1e} of its largest value")


def _write_components(loaded: LoadedRole, folder: Path, how: Literal["link", "copy", "none"]) -> None:
    """Write the rest of the pipeline; a scheduler that is written already is the run's own."""
    index = read_json(loaded.base / INDEX)
    scheduler = euler_scheduler(loaded.run.sampler, given=loaded.family.given_levels(loaded.base))
    if scheduler is not None:
        index["scheduler"] = ["diffusers", type(scheduler).__name__]
    if loaded.layout.boundary is not None:
        high, low = loaded.family.experts
        index |= {low: index[high], "boundary_ratio": loaded.layout.boundary}
    if how != "none":
        write_components(loaded.base, folder, index, link_or_copy if how == "link" else shutil.copyfile)


def write_components(base: Path, folder: Path, index: Mapping[str, Any], place: Callable[..., object]) -> None:
    """Write the index of a pipeline and the components of its base that `folder` lacks; `place` copies a file."""
    index = {key: value for key, value in index.items() if key != "_name_or_path"}  # a path on another machine
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    present = [name for name, entry in index.items() if isinstance(entry, list) and entry[0] is not None]
    for name in present:
        if not (folder / name).exists():
            shutil.copytree(base / name, folder / name, copy_function=place)


def _about(loaded: LoadedRole, role: str, spec: str, layout: str) -> dict[str, Any]:
    """Say where the folder comes from, without a path of this machine, and how diffusers samples as the run does."""
    sampler, name = loaded.run.sampler, Spec.of(spec)
    if layout != DIFFUSERS:
        how = f"ComfyUI and {layout.capitalize()}'s own code read it; README.md names noise levels and guidance"
    elif loaded.actions:
        how = "diffusers' own pipeline drops the layer by which the network reads actions"
    elif loaded.role.config.is_flow_map:
        how = "diffusers' own pipeline drops the layer by which a flow map reads the length of a step"
    elif euler_scheduler(sampler, given=loaded.family.given_levels(loaded.base)) is None:
        how = "diffusers has no scheduler for its sampler"
    else:
        alone = f"num_inference_steps={sampler.num_steps}, {_guidance(loaded)}"
        how = f"With the scheduler alone, sample with {alone}"
        if sampler.solver == "sde" and sampler.num_steps > 1:
            how += "; the noise of its sde then comes from torch.manual_seed, not from the generator of the pipeline"
    if loaded.family.exported_pipeline is not None and layout == DIFFUSERS:
        how = f"Its {PIPELINE} makes the videos of `sample`: README.md shows how. {how}"
    return {
        "role": role,
        "from": f"{name.run.resolve().name}@{loaded.metadata['step']}{':ema' * name.ema}",
        "step": loaded.metadata["step"],
        "method": loaded.metadata["method"],
        "boundary": loaded.layout.boundary,
        "sampler": settings.plain(loaded.run)["sampler"],
        "how": how,
    }


def _guidance(loaded: LoadedRole) -> str:
    """Write the guidance of a run as arguments of the family's diffusers pipeline."""
    sampler, guidance = loaded.run.sampler, loaded.family.guidance
    if loaded.family.guider:
        return f"the scale in {loaded.family.guider} and the run's negative_prompt"
    if isinstance(sampler.guidance_scale, tuple):
        high, low = sampler.guidance_scale
        return f"guidance_scale={high}, guidance_scale_2={low}"
    negative = "" if sampler.guidance_scale == 1 else " and the run's negative_prompt"
    given = guidance(loaded.base, sampler.guidance_scale, loaded.run.encoders)
    return ", ".join(f"{name}={value}" for name, value in given.items()) + negative
