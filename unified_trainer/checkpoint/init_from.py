"""Weights from a checkpoint into the roles of another run: role by role, all of them or none."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from unified_trainer.checkpoint.dcp import CheckpointError, Spec, damage, find, load, shapes
from unified_trainer.checkpoint.manifest import Manifest
from unified_trainer.parallel.mesh import Mesh

ADAPTER = ".lora_"  # in the names of adapter weights


def initialise(roles: Mapping[str, Mapping[str, Tensor]], spec: str | Path, mesh: Mesh) -> str:
    """Fill the weights of the roles that RUN[@step][:ema] holds, in place; what was done, in words.

    A role that it lacks stays as it is. CheckpointError, before any weight is overwritten, when it holds none of them,
    was damaged, or has a role with other weights.
    """
    folder, metadata = find(spec)
    kinds = _kinds(roles, folder, spec)
    if fault := damage(folder, mesh, kinds.values()):
        raise CheckpointError(f"{folder}: {fault}; take another one with {Spec.of(spec).run}@STEP")
    for name, kind in kinds.items():
        held = {key.removeprefix(f"{kind}/"): tuple(shape) for key, shape in shapes(folder, kind).items()}
        _check_same(name, {key: tuple(tensor.shape) for key, tensor in roles[name].items()}, held, folder, spec)
    taken = {f"{kind}/{key}": tensor.detach() for name, kind in kinds.items() for key, tensor in roles[name].items()}
    load(folder, taken, mesh)
    return _words(roles, kinds, folder, metadata)


def roles_in(metadata: Manifest) -> list[str]:
    """The roles whose weights a checkpoint holds."""
    return sorted({name.split("/")[0] for name in metadata["files"] if name.split("/")[1] == "weights"})


def _kinds(roles: Mapping[str, object], folder: Path, spec: str | Path) -> dict[str, str]:
    """What of the checkpoint each role is filled with; roles that it lacks are left out."""
    have = [name for name in roles if (folder / name / "weights").is_dir()]
    if not have:
        there = ", ".join(sorted(path.name for path in folder.iterdir() if path.is_dir()))
        raise CheckpointError(f"{folder} holds weights of {there}, not of {', '.join(roles)}")
    averaged = [name for name in have if Spec.of(spec).averaged and (folder / name / "ema").is_dir()]
    if Spec.of(spec).averaged and not averaged:
        raise CheckpointError(f"{spec}: {folder} keeps no averaged weights of {', '.join(have)}; leave :ema out")
    return {name: f"{name}/ema" if name in averaged else f"{name}/weights" for name in have}


def _check_same(
    role: str, own: Mapping[str, tuple[int, ...]], held: Mapping[str, tuple[int, ...]], folder: Path, spec: str | Path
) -> None:
    """The same tensors in the same shapes."""
    sides = [sorted({key.split("/")[0] for key in keys if "/" in key}) for keys in (held, own)]
    if sides[0] != sides[1]:
        there, here = (f"the {' and '.join(each)} noise expert" if each else "one network" for each in sides)
        raise CheckpointError(
            f"{folder} holds {there} of {role}, this run trains {here}: write its weights out with "
            f"`python -m unified_trainer export {spec} DIR` and start from --{role}.path DIR"
        )
    adapters = [any(ADAPTER in key for key in keys) for keys in (held, own)]
    if adapters[0] != adapters[1]:
        kind = {True: "an adapter", False: "all weights"}
        raise CheckpointError(
            f"{folder} holds {kind[adapters[0]]} of {role}, this run trains {kind[adapters[1]]}: write its weights out "
            f"with `python -m unified_trainer export {spec} DIR` and start from --{role}.path DIR"
        )
    for key in sorted(own.keys() | held.keys()):
        if own.get(key) != held.get(key):
            there, here = ("absent" if key not in keys else str(keys[key]) for keys in (held, own))
            raise CheckpointError(f"{folder}: {role}'s {key} is {there} there, {here} in this run: another model")


def _words(roles: Mapping[str, object], kinds: Mapping[str, str], folder: Path, metadata: Manifest) -> str:
    parts = [f"{name}{' (averaged)' if kind.endswith('/ema') else ''}" for name, kind in kinds.items()]
    said = [f"{', '.join(parts)} from {folder}"]
    said += [f"{name} starts from its own path, there is none" for name in roles if name not in kinds]
    said += [f"its {name} is left behind" for name in roles_in(metadata) if name not in roles]
    if metadata["sampler"]:
        settings = {key: value for key, value in metadata["sampler"].items() if isinstance(value, int | float | str)}
        made_for = ", ".join(f"{key} {value}" for key, value in settings.items() if value)
    said.append(f"made for the sampler {made_for}" if metadata["sampler"] else "made for no sampler of its own")
    return "; ".join(said)
