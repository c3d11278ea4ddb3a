"""Methods, policy objectives and model families by name. The tables are text: an entry is imported when it is named."""

import typing
from collections.abc import Iterable
from pathlib import Path

from pydantic import Field

from unified_trainer.basics.errors import MissingFileError, UserError
from unified_trainer.basics.input_files import Schema, read_as
from unified_trainer.basics.plugins import installed, load_object
from unified_trainer.basics.suggestions import must_know
from unified_trainer.methods import METHODS
from unified_trainer.methods.base import Method
from unified_trainer.models import hub
from unified_trainer.models.base import Family, VideoModel
from unified_trainer.numerics.objectives import OBJECTIVES, Objective
from unified_trainer.roles.role import RoleConfig

TINY = Path(__file__).parents[1] / "assets" / "tiny"
WAN = "unified_trainer.models.wan.family:WAN"
FAMILIES: dict[str, str | Family] = {"WanPipeline": WAN, "WanImageToVideoPipeline": WAN}
PLAIN = RoleConfig()


class PipelineIndex(Schema):
    """model_index.json, as far as it names the family."""

    class_name: str = Field(alias="_class_name")


def method_named(name: str) -> type[Method]:
    """Return the method of --method: a name, or path/to/file.py:Class or package.module:Class."""
    offered = installed("methods") | METHODS
    if ":" not in name:
        must_know("--method", name, [*METHODS, *offered])
    method = load_object(offered.get(name, name), "--method", name)
    if not (isinstance(method, type) and issubclass(method, Method)):
        raise UserError(f"--method {name} is not a subclass of unified_trainer.methods.base.Method")
    return method


def objective_of(kind: str) -> Objective:
    """Return an objective with its defaults; `kind` is a name, or path/to/file.py:Class or package.module:Class."""
    key = "algorithm.objective.kind"
    if kind in OBJECTIVES:
        return OBJECTIVES[kind](kind)
    offered = installed("objectives")
    if ":" not in kind:
        must_know(key, kind, [*OBJECTIVES, *offered])
    made = load_object(offered.get(kind, kind), key, kind)
    if not (isinstance(made, type) and issubclass(made, Objective)) or "__dataclass_params__" not in vars(made):
        raise UserError(f"{key} {kind} is no frozen dataclass derived from unified_trainer.Objective")
    for name, declared in typing.get_type_hints(made).items():
        if name != "kind" and typing.get_origin(declared) is not typing.ClassVar and declared not in (int, float, bool):
            raise UserError(f"{key} {kind}: {name} is declared as {declared}; a parameter of an objective is a number")
    return made(kind)


def add_families(specs: Iterable[str]) -> None:
    """Add the model families of --families, each path/to/file.py:NAME or package.module:NAME, to the table."""
    for spec in specs:
        family = load_object(spec, "--families")
        if not isinstance(family, Family):
            raise UserError(f"--families {spec} is a {type(family).__name__}, not a unified_trainer.Family")
        FAMILIES.update(dict.fromkeys(family.pipelines, family))


def family_of(role: str, path: str) -> tuple[Family, Path]:
    """Return the family and the folder of a role's path; UserError names the file before any weight is read."""
    key = role if role.startswith("--") else f"{role}.path"
    if path == "tiny":
        folder = TINY / "wan"
    elif hub.is_hub_id(path):
        folder = hub.cached(path, key, hub.CONFIGS, hub.PIPELINE)
    else:
        folder = Path(path)
    index = folder / "model_index.json"
    try:
        name = read_as(PipelineIndex, index).class_name
    except MissingFileError as error:
        raise MissingFileError(f"{key} {path} {_way_out(folder, str(error))}") from error
    return family_named(name, str(index), key, path), folder


def _way_out(path: Path, error: str) -> str:
    """Return what a path is that is no pipeline folder, and what to give."""
    importing = f"`python -m unified_trainer import-weights {path} DIR --base PIPELINE`, and give DIR"
    if (path / "config.yaml").is_file() and (path / "checkpoints").is_dir():
        return (
            f"is a run: start trained roles from its weights with --init-from {path}, or write a pipeline folder with "
            f"`python -m unified_trainer export {path} DIR` and give that"
        )
    if not path.exists() and not path.is_symlink():
        return "is not there: it must be a diffusers pipeline folder, or a hub id, owner/name"
    if path.is_file():
        return f"is one file: write a pipeline folder with its weights by {importing}; an adapter goes to adapter.path"
    if (path.absolute().parent / "model_index.json").is_file():
        return f"is one component of a pipeline: give the whole folder, {path.absolute().parent}"
    if any(path.glob("models_t5*.pth")) or any(path.glob("*_noise_model")):
        return (
            f"is a folder of Wan's own code: write a pipeline folder by {importing}. PIPELINE is the same model for "
            "diffusers, such as Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
        )
    if any(path.glob("adapter_config.json")) or any(path.glob("pytorch_lora_weights*")):
        return "is an adapter: give its base here, and the adapter as adapter.path of the same role"
    if any(path.glob("*.safetensors")) or any(path.glob("*.pt*")):
        return f"holds weights without a pipeline: write a pipeline folder with them by {importing}"
    return f"must be a diffusers pipeline folder: {error}"


def family_named(name: str, where: str, key: str = "the model family", path: str = "") -> Family:
    """Return the family of a pipeline class; UserError, which says where it is named, for one that is not known.

    `path`, the value of the setting `key`, is the model's folder.
    """
    if name not in FAMILIES:
        offered = installed("families")
        FAMILIES[name] = offered[name] if name in offered else _family_of_pipeline(name, where)
    family = FAMILIES[name]
    if isinstance(family, str):
        family = FAMILIES[name] = load_object(family, key, path)
    return family


def _family_of_pipeline(name: str, where: str) -> Family:
    """Return the family that learns from the call of a pipeline class of diffusers; UserError for another name."""
    import diffusers

    if not name.endswith("Pipeline") or name not in dir(diffusers):
        raise UserError(
            f"{where}: {name} is no pipeline of diffusers {diffusers.__version__}; update diffusers, or name a family "
            "of yours by --families"
        )
    from unified_trainer.models.pipeline.family import pipeline_family

    return pipeline_family(name)


def open_model(
    role: str,
    path: str,
    component: str,
    *,
    causal: bool,
    config: RoleConfig = PLAIN,
) -> VideoModel:
    """Open a network of a role's path in the form of its settings; its weights are read later, shard by shard."""
    family, folder = family_of(role, path)
    if config.is_flow_map:
        if family.flow_map is None:
            raise UserError(f"{role}.flow_map: {folder} is of a family without flow maps, leave it out")
        return family.flow_map(folder, component)
    if config.sparse.share:
        if family.sparse is None:
            raise UserError(f"{role}.sparse_attention: {folder} is of a family without sparse attention, leave it out")
        return family.sparse(folder, component, config.sparse, causal)
    if config.new_actions:
        if family.acting is None:
            raise UserError(f"{role}.action_size: {folder} is of a family whose networks take no actions, leave it out")
        return family.acting(folder, component, causal, config.new_actions)
    if not causal:
        return family.model(folder, component)
    assert family.causal is not None  # the check of the roles refuses other families
    return family.causal(folder, component)
