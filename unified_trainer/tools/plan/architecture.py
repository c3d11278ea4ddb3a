"""The sizes of the models that the recipes are made for: from a folder's configs, or as they were published.

No weight is read. HPSv3 (arXiv:2508.03789) is Qwen/Qwen2-VL-7B-Instruct with a head in place of the vocabulary's.
"""

import atexit
import functools
import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.input_files import read_json, read_yaml
from unified_trainer.models import hub
from unified_trainer.models.base import ActionForm, Family, Shape
from unified_trainer.models.blueprint import Blueprint, Config, frozen_config
from unified_trainer.models.pass_flops import PassCount
from unified_trainer.run.registry import family_named, family_of
from unified_trainer.run.settings.config import RunConfig, load_recipe
from unified_trainer.tools.plan.network_size import NetworkSize, plain_pass, size_of

PUBLISHED = Path(__file__).parents[2] / "assets" / "published.yaml"
TURNS = (
    "{% for turn in messages %}{{ turn.role }} {% if turn.content is string %}{{ turn.content }}{% else %}"
    "{% for part in turn.content %}{{ part.text }}{% endfor %}{% endif %} {% endfor %}"
)
HPSV3_WEIGHTS = 8.29e9 - 152064 * 3584 + 3584 * 1024 + 1024 * 16  # without the vocabulary's head, with its own


@dataclass(frozen=True)
class Architecture:
    """A model of a family: one or two transformers, a VAE and text encoders."""

    source: str  # where the sizes come from
    family: Family
    folder: Path  # of its configs
    gates: int = 0  # layers of a block that the role's sparse attention adds
    flow_map: bool = False  # whether the role is a flow map
    actions: ActionForm | None = None  # that the role takes
    new_actions: bool = False  # by a layer that the folder lacks

    @cached_property
    def blueprint(self) -> Blueprint:
        """The networks of the folder without weights."""
        assert self.family.blueprint is not None  # `architecture_of` refuses families without one
        return self.family.blueprint(self.folder)

    @property
    def kind(self) -> Any:
        """The ModelKind that makes the network's model."""
        if self.actions and self.blueprint.acting:
            return self.blueprint.acting(self.actions, self.new_actions)
        return (self.blueprint.flow_map if self.flow_map else None) or self.blueprint.model

    @cached_property
    def config(self) -> Config:
        """The config of the transformer, as a key of caches."""
        return frozen_config(read_json(self.folder / self.networks[0][0] / "config.json"))

    @cached_property
    def vae(self) -> Config:
        """The config of the VAE, as a key of caches."""
        return frozen_config(read_json(self.folder / "vae" / "config.json"))

    @cached_property
    def size(self) -> NetworkSize:
        return replace(size_of(self.kind, self.config), gates=self.gates)

    def plain_pass(self, shape: Shape) -> PassCount:
        """Return the FLOPs of a forward pass over one sample whose latents have this shape."""
        return plain_pass(self.kind, self.config, shape, self.text_tokens)

    @property
    def text_tokens(self) -> int:
        """The rows that the tensors of a prompt are padded to."""
        return max((shape[0] for shape in self.blueprint.text_shapes.values() if len(shape) > 1), default=1)

    @cached_property
    def vae_weights(self) -> int:
        """The number of weights of the VAE, laid out without memory."""
        with torch.device("meta"):
            network = self.blueprint.vae.vae_class.from_config(json.loads(self.vae))
        return sum(p.numel() for p in network.parameters())

    def latent_shape(self, frames: int, height: int, width: int) -> Shape:
        """Return channels, latent frames, height and width of a video; UserError for one that no latents make."""
        return self.family.latent_shape(self.folder, frames, height, width)

    @cached_property
    def networks(self) -> tuple[tuple[str, ...], float | None]:
        """The folders of its networks, and the noise level at which two of them meet."""
        return self.family.networks(self.folder)


def architecture_of(role: str, path: str, run: RunConfig) -> Architecture:
    """Return the sizes of the model in a role's path; an empty path is the model that the recipe was made for.

    UserError for a model that is neither published with these sizes nor in a folder of a family with a blueprint.
    """
    if path and path != "tiny" and hub.is_hub_id(path) and not Path(path).exists():
        name = path.partition("@")[0]
        if name not in published():
            raise UserError(
                f"{role}.path {path}: no sizes are known for it; name a folder with its config.json files, or one of "
                f"{', '.join(published())}"
            )
        return _published(name, f"published configs of {name}")
    if path:
        family, folder = family_of(role, path)
        if family.blueprint is None:
            raise UserError(
                f"{role}.path {folder}: memory and FLOPs are computed for families with a blueprint; set that of "
                f"the family of {family.pipelines[0]} (unified_trainer.models.blueprint.Blueprint)"
            )
        return Architecture(f"configs in {folder}", family, folder)
    fits = load_recipe(run.recipe).get("fits", {}) if run.recipe else {}
    for name, parts in published().items():
        known = {**parts["transformer"], "networks": 2 if "transformer_2" in parts else 1}
        if fits and fits.items() <= known.items():
            return _published(name, f"recipe {run.recipe}: published configs of {name}")
    raise UserError(
        f"{role}.path is not given and recipe {run.recipe or '(none)'} fits no published model: name a folder with "
        f"model_index.json and the config.json files, or a hub id of {', '.join(published())}"
    )


def _published(name: str, source: str) -> Architecture:
    return Architecture(source, family_named(published()[name]["_class_name"], name), published_folder(name))


@functools.cache
def published() -> Mapping[str, Mapping[str, Any]]:
    """Return the configs of published models by their hub ids, as far as sizes depend on them."""
    return read_yaml(PUBLISHED)


@functools.cache
def published_folder(name: str) -> Path:
    """Write the configs of a published model as its folder has them, until the process ends; return the folder.

    Tokenizers have one token for each word: a longest prompt fills all rows with them too.
    """
    folder = Path(tempfile.mkdtemp(prefix="unified-trainer-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    index: dict[str, Any] = {}
    for part, config in published()[name].items():
        if not isinstance(config, dict):
            index[part] = config
            continue
        (folder / part).mkdir()
        if "model_max_length" in config:
            index[part] = ["transformers", "PreTrainedTokenizerFast"]
            word_tokenizer(**config).save_pretrained(folder / part)
            continue
        kind = config.get("_class_name") or config.get("image_processor_type") or config["architectures"][0]
        index[part] = ["diffusers" if "_class_name" in config else "transformers", kind]
        file = {"scheduler": "scheduler_config", "guider": "guider_config", "feature_extractor": "preprocessor_config"}
        (folder / part / f"{file.get(part, 'config')}.json").write_text(json.dumps(config))
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def word_tokenizer(model_max_length: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose words are all one token, in turns of a chat too."""
    marks = ("<unk>", "<pad>", "</s>")
    words = Tokenizer(WordLevel({mark: number for number, mark in enumerate(marks)}, unk_token=marks[0]))
    words.pre_tokenizer = Whitespace()
    said = dict(zip(("unk_token", "pad_token", "eos_token"), marks, strict=True))
    return PreTrainedTokenizerFast(
        tokenizer_object=words, model_max_length=model_max_length, chat_template=TURNS, **said
    )
