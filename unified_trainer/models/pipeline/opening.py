"""A pipeline folder of diffusers, opened with networks without memory."""

import inspect
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from accelerate import init_empty_weights
from diffusers import FlowMatchEulerDiscreteScheduler
from safetensors import safe_open
from torch import nn

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.input_files import read_json
from unified_trainer.models.chat_template import check_bounds
from unified_trainer.models.folder import read_pretrained
from unified_trainer.models.pipeline.calls import Pipeline
from unified_trainer.models.pipeline.vae import fix
from unified_trainer.models.pipeline.without_memory import WithoutMemory

NETWORKS = ("transformer", "transformer_2")


def open_pipeline(folder: Path) -> Pipeline:
    """Open a folder: networks answer without memory, everything else is read; UserError for what cannot be opened."""
    file = folder / "model_index.json"
    index, memory = read_json(file), WithoutMemory()
    kind, parts = component_class(file, "diffusers", index["_class_name"]), dict[str, Any]()
    classes = component_classes(folder)
    for name, value in index.items():
        if name not in classes and not name.startswith("_"):
            parts[name] = None if value == [None, None] else value
    for name, part in classes.items():
        if name == "scheduler":
            parts[name] = flow_scheduler(folder / name)
        elif issubclass(part, nn.Module):
            parts[name] = memory.prepare(outline(part, folder / name, buffers=name.endswith("vae")))
        else:
            parts[name] = read_part(part, folder / name)
    networks = [name for name in NETWORKS if isinstance(parts.get(name), nn.Module)]
    if not networks or not isinstance(parts.get("vae"), nn.Module):
        held = ", ".join(parts) or "no component"
        raise UserError(f"{file}: a pipeline needs a transformer and a vae, and this one has {held}")
    fix(parts["vae"])
    if unknown := parts.keys() - inspect.signature(kind.__init__).parameters.keys():
        raise UserError(f"{file}: {kind.__name__} has no {', '.join(sorted(unknown))}")
    # the device of a pipeline is that of its networks, and those without memory have none
    called = {"_execution_device": property(lambda pipe: pipe.call_device), "call_device": torch.device("cpu")}
    pipe = type(kind.__name__, (kind,), called)(**parts)
    pipe.set_progress_bar_config(disable=True)
    return Pipeline(folder, pipe, networks, memory)


def component_classes(folder: Path) -> dict[str, Any]:
    """Return the classes of a folder's components by name; UserError for one that is unknown."""
    index = read_json(file := folder / "model_index.json")
    pipeline = component_class(file, "diffusers", index["_class_name"])
    package = sys.modules[pipeline.__module__.rpartition(".")[0]]  # may bring classes that transformers hides
    return {
        name: component_class(file, *value, package)
        for name, value in index.items()
        if not name.startswith("_")
        and (isinstance(value, list) and len(value) == 2 and all(isinstance(part, str) for part in value))
    }


def component_class(file: Path, library: str, name: str, *homes: Any) -> Any:
    """Return the class of a component, of diffusers or transformers alone: what a folder names elsewhere is not run."""
    places = [transformers if library == "transformers" else diffusers, *homes]
    places += [vars(diffusers.pipelines)[library]] if library in vars(diffusers.pipelines) else []
    for home in places:
        with suppress(AttributeError):  # listing the names of transformers would take a second
            if isinstance(found := getattr(home, name), type):
                return found
    raise UserError(f"{file}: {library}.{name} is no class of diffusers {diffusers.__version__} or transformers")


def outline(kind: Any, folder: Path, *, buffers: bool = False) -> nn.Module:
    """Return a network on the meta device; with `buffers` those that its files hold are read."""
    with init_empty_weights(include_buffers=False):
        if issubclass(kind, diffusers.ModelMixin):
            network = kind.from_config(kind.load_config(folder))
        else:  # the masks of other kinds of attention depend on values
            config = read_pretrained(kind.config_class, folder)
            if kind.__name__.endswith("Encoder") and "encoder" in config.sub_configs:
                config = config.encoder
            config.get_text_config().use_cache = False  # so that layers have no state, and equal ones answer once
            network = kind._from_config(config, attn_implementation="eager")
    for file in folder.glob("*.safetensors") if buffers else ():
        with safe_open(file, "pt") as held:
            names = set(held.keys())
            for name, table in network.named_buffers():
                if name not in names:
                    continue
                if (given := held.get_tensor(name)).shape != table.shape:
                    raise UserError(f"{file}: {name} is {[*given.shape]}, but by config.json {[*table.shape]}")
                table.copy_(given)
    return network


def read_part(kind: Any, folder: Path) -> Any:
    """Read a component without weights, such as a tokenizer or an image processor; none of its code runs."""
    part = read_pretrained(kind, folder)
    for held in (part, vars(part).get("tokenizer")):
        if isinstance(held, transformers.PreTrainedTokenizerBase) and held.chat_template:
            templates = held.chat_template if isinstance(held.chat_template, dict) else {"": held.chat_template}
            for template in templates.values():
                check_bounds(template, str(folder))
    return part


def flow_scheduler(folder: Path) -> FlowMatchEulerDiscreteScheduler:
    """Return the folder's scheduler with Euler's law; UserError for one that is not of flow matching."""
    config = read_json(folder / "scheduler_config.json")
    name = config.get("_class_name", "")
    if name == "FlowMatchEulerDiscreteScheduler":
        return FlowMatchEulerDiscreteScheduler.from_config(config)
    flows = config.get("use_flow_sigmas") or config.get("prediction_type") == "flow_prediction"
    if flows or name.startswith("FlowMatch"):
        return FlowMatchEulerDiscreteScheduler(shift=config.get("flow_shift") or config.get("shift") or 1.0)
    raise UserError(f"{folder / 'scheduler_config.json'}: {name} is no scheduler of flow matching")
