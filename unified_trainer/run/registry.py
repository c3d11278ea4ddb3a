"""Methods and model families by name. The tables are text: an entry is imported when it is named."""

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
from unified_trainer.models.sparse_attention import DENSE, SparseAttentionConfig

TINY = Path(__file__).parents[1] / "assets" / "tiny"
WAN = "unified_trainer.models.wan.family:WAN"
QWEN_IMAGE = "unified_trainer.models.qwen_image.family:QWEN_IMAGE"
SD3 = "unified_trainer.models.sd3.family:SD3"
HUNYUAN15 = "unified_trainer.models.hunyuan15.family:HUNYUAN15"
LTX = "unified_trainer.models.ltx.family:LTX"
LTX2 = "unified_trainer.models.ltx2.family:LTX2"
FAMILIES: dict[str, str | Family] = {
    "WanPipeline": WAN,
    "WanImageToVideoPipeline": WAN,
    "QwenImagePipeline": QWEN_IMAGE,
    "StableDiffusion3Pipeline": SD3,
    "HunyuanVideo15Pipeline": HUNYUAN15,
    "HunyuanVideo15ImageToVideoPipeline": HUNYUAN15,
    "LTXPipeline": LTX,
    "LTXImageToVideoPipeline": LTX,
    "LTX2Pipeline": LTX2,
}


class PipelineIndex(Schema):
    """model_index.json, as far as it names the family."""

    class_name: str = Field(alias="_class_name")


def method_named(name: str) -> type[Method]:
    """Return the method of --method: a name, or path/to/file.py:Class or package.module:Class."""
    if name in METHODS or ":" in name:
        method = load_object(METHODS.get(name, name), "--method")
    else:
        offered = installed("methods")
        must_know("--method", name, [*METHODS, *offered])
        method = offered[name].load()
    if not (isinstance(method, type) and issubclass(method, Method)):
        raise UserError(f"--method {name} is not a subclass of unified_trainer.methods.base.Method")
    return method


def add_families(specs: Iterable[str]) -> None:
    """Add the model families of --families, each path/to/file.py:NAME or package.module:NAME, to the table."""
    for spec in specs:
        family = load_object(spec, "--families")
        if not isinstance(family, Family):
            raise UserError(f"--families {spec} is a {type(family).__name__}, not a unified_trainer.Family")
        FAMILIES.update(dict.fromkeys(family.pipelines, family))


def family_of(role: str, path: str) -> tuple[Family, Path]:
    """Return the family and the folder of a role's path; UserError names the file before any weight is read."""
    if path == "tiny":
        folder = TINY / "wan"
    elif hub.is_hub_id(path):
        folder = hub.cached(path, f"{role}.path", hub.CONFIGS, hub.PIPELINE)
    else:
        folder = Path(path)
    index = folder / "model_index.json"
    try:
        name = read_as(PipelineIndex, index).class_name
    except MissingFileError as error:
        if (folder / "config.yaml").is_file() and (folder / "checkpoints").is_dir():
            raise MissingFileError(
                f"{role}.path {path} is a run: start trained roles from its weights with --init-from {path}, or write "
                f"a pipeline folder with `python -m unified_trainer export {path} DIR` and give that"
            ) from error
        raise MissingFileError(f"{error}: {role}.path must be a diffusers pipeline folder") from error
    return family_named(name, str(index)), folder


def family_named(name: str, where: str) -> Family:
    """Return the family of a pipeline class; UserError, which says where it is named, for one that is not known."""
    if name not in FAMILIES:
        offered = installed("families")
        if name not in offered:
            have = ", ".join(sorted({*FAMILIES, *offered}))
            raise UserError(f"{where}: {name} is not supported; have {have}, or name a family of yours by --families")
        FAMILIES[name] = offered[name].load()
    family = FAMILIES[name]
    if isinstance(family, str):
        family = FAMILIES[name] = load_object(family, "the model family")
    return family


def open_model(
    role: str,
    path: str,
    component: str,
    *,
    causal: bool,
    sparse: SparseAttentionConfig = DENSE,
    flow_map: bool = False,
) -> VideoModel:
    """Open a network of a role's path in one of its forms; its weights are read later, shard by shard."""
    family, folder = family_of(role, path)
    if flow_map:
        if family.flow_map is None:
            raise UserError(f"{role}.flow_map: {folder} is of a family without flow maps, leave it out")
        return family.flow_map(folder, component)
    if sparse.share:
        if family.sparse is None:
            raise UserError(f"{role}.sparse_attention: {folder} is of a family without sparse attention, leave it out")
        return family.sparse(folder, component, sparse)
    if not causal:
        return family.model(folder, component)
    assert family.causal is not None  # the check of the roles refuses other families
    return family.causal(folder, component)
