"""The commands merge and extract-adapter: adapters of pipeline folders, without a run."""

import math
from functools import reduce
from operator import add
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from torch import Tensor, nn

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.input_files import read_json
from unified_trainer.basics.ranges import at_least
from unified_trainer.basics.suggestions import must_know
from unified_trainer.basics.terminal import say
from unified_trainer.basics.types import DTYPES
from unified_trainer.models.adapter_file import AdapterFile, open_adapter
from unified_trainer.models.folder import check_unrounded
from unified_trainer.models.tensor_file import write_tensors
from unified_trainer.parallel.device import Device, pick_device
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.run.plan.adapters import place_of
from unified_trainer.run.registry import family_of
from unified_trainer.tools.export.export import INDEX, PIPELINE, write_components
from unified_trainer.tools.output_folder import check_empty, link_or_copy, new_folder

ALONE = Mesh(torch.device("cpu"))


def merge(
    base: Annotated[str, tyro.conf.Positional],
    out: Annotated[Path, tyro.conf.Positional],
    adapters: tuple[str, ...],
    component: str = "",
    dtype: Literal["fp32", "bf16"] = "fp32",
) -> None:
    """Write a pipeline folder with adapters added to its weights, in float32; no run is needed.

    Args:
        base: Pipeline folder or hub id of the model that the adapters were made for.
        out: Folder to write; it must be empty or absent.
        adapters: FILE or FILE:FACTOR of each adapter, in a layout of docs/weights.md.
        component: Network that they are added to, such as transformer_2. Without it, those of two experts have a part
            for each.
        dtype: Precision of the written weights.
    """
    check_empty(out)
    family, folder = family_of("base", base)
    if not adapters:
        raise UserError("--adapters names no adapter: give FILE, or FILE:FACTOR, one or more times")
    names = family.networks(folder)[0]
    if component:
        must_know("--component", component, names)
        names = (component,)
    check_unrounded(*(folder / name for name in names))
    models = {name: family.model(folder, name) for name in names}
    sums = dict[str, AdapterFile]()
    for number, (name, model) in enumerate(models.items()):
        places = [place_of("--adapters", text, number if len(models) > 1 else None, family) for text in adapters]
        opened = (open_adapter(p, model.network, family.experts, family.published_layer) for p in places)
        sums[name] = reduce(add, opened)
    with new_folder(out) as built:
        for name in names:
            model = models.pop(name)
            model.read(ALONE)
            for key in sums[name].changed:
                weight = model.network.get_parameter(key)
                weight.data += sums[name].change(key, weight.shape, ALONE.device)
            model.save(built, name, DTYPES[dtype])
        write_components(folder, built, read_json(folder / INDEX), link_or_copy)
        if (folder / PIPELINE).is_file():  # of an export
            link_or_copy(folder / PIPELINE, built / PIPELINE)
    said = ", ".join(f"{adapter.name} in {name}" for name, adapter in sums.items())
    say(f"{out}: {folder} with {said}")


def extract_adapter(
    tuned: Annotated[str, tyro.conf.Positional],
    out: Annotated[Path, tyro.conf.Positional],
    base: str,
    rank: Annotated[int, at_least(1, 8192)] = 32,
    device: Device = "auto",
) -> None:
    """Write the adapter that is nearest to the difference of two folders' weights, by SVD, and print its error.

    Args:
        tuned: Pipeline folder or hub id of the trained weights, such as an export.
        out: Folder to write, by the names of the family's published adapters; it must be empty or absent.
        base: Pipeline folder or hub id of the weights before training.
        rank: Rank of the adapter on every layer.
        device: Device that computes the SVD.
    """
    check_empty(out)
    (family, before), (_, after) = family_of("base", base), family_of("tuned", tuned)
    names, said = family.networks(before)[0], []
    if (other := family.networks(after)[0]) != names:
        raise UserError(f"{after} has {' and '.join(other)}, but {before} has {' and '.join(names)}")
    check_unrounded(*(folder / name for folder in (before, after) for name in names))
    with new_folder(out) as built:
        for number, name in enumerate(names):
            pair = old, new = family.model(before, name), family.model(after, name)
            first, second = ({(key, w.shape) for key, w in model.network.named_parameters()} for model in pair)
            if unlike := first ^ second:
                raise UserError(f"{after / name} and {before / name} have other weights, such as {min(unlike)[0]}")
            for model in pair:
                model.read(ALONE)
            factors, errors = low_rank(old.network, new.network, rank, pick_device(device, 0))
            said.append(f"{name}: {errors}")
            if factors:
                file = built / f"{family.adapter_files[number] if len(names) > 1 else 'model'}.safetensors"
                write_tensors(file, family.published_adapter(factors, rank), {"format": "pt"})
        if not any(built.iterdir()):
            raise UserError(f"no linear layer of {after} differs from {before}: there is nothing to extract")
    say(f"{out}: rank {rank}. {'. '.join(said)}")


@torch.no_grad()
def low_rank(old: nn.Module, new: nn.Module, rank: int, device: torch.device) -> tuple[dict[str, Tensor], str]:
    """Return factors of the change of every linear layer, by peft's names, and their error in words.

    U S V = W_new - W_old, B = U sqrt(S), A = sqrt(S) V of the `rank` largest singular values, and zeros where a layer
    has fewer.
    """
    layers = {name for name, module in old.named_modules() if isinstance(module, nn.Linear)}
    after, factors = dict(new.named_parameters()), {}
    changed, missed, others = 0.0, 0.0, {}  # squared norms
    for key, weight in old.named_parameters():
        change, layer = (after[key] - weight).to(device), key.removesuffix(".weight")
        size = float(change.double().square().sum())
        changed += size
        if layer not in layers:
            others |= {key: size} if size else {}
        elif size:
            u, s, v = torch.linalg.svd(change, full_matrices=False)
            a, b = change.new_zeros(rank, change.shape[1]), change.new_zeros(change.shape[0], rank)
            a[: len(s)], b[:, : len(s)] = s[:rank, None].sqrt() * v[:rank], s[:rank].sqrt() * u[:, :rank]
            factors |= {f"{layer}.lora_A.weight": a.cpu(), f"{layer}.lora_B.weight": b.cpu()}
            missed += float(s[rank:].double().square().sum())
    rest = sum(others.values())
    error, left_out = (math.sqrt(part / (changed or 1.0)) for part in (missed + rest, rest))
    said = f"{len(factors) // 2} layers, error {error:.1e} of the norm of the change"
    return factors, said + (f", {left_out:.1e} in {len(others)} other weights such as {min(others)}" if others else "")
