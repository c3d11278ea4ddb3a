"""The files of a run that lie on the Hugging Face hub: fetched once per node, and pinned to their commits."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from unified_trainer.basics.errors import MissingFileError
from unified_trainer.basics.input_files import read_json
from unified_trainer.models import hub
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.rewards.reward import RewardConfig, ScorerConfig
from unified_trainer.rewards.scorers import KINDS
from unified_trainer.run.registry import family_of, method_named
from unified_trainer.run.settings.config import RunConfig


def fetched(run: RunConfig, mesh: Mesh) -> RunConfig:
    """Return the run with each hub id pinned to a commit, whose files this node then has.

    The first rank of a node downloads what the run needs, and the others wait. All ranks must call it. Raise UserError,
    with the way out, for a repository that is absent or cannot be reached.
    """
    method = method_named(run.method)
    needed = {name: config.path for name, config in run.roles.items() if run.needs_role(name)}
    roles = {name: path for name, path in needed.items() if hub.is_hub_id(path)}
    scorers = {name: part for name, part in run.reward.named().items() if _on_hub(part)}
    if not roles and not scorers and local_prompts(run) == run:
        return run
    if mesh.first_on_node:
        _with_prompts(run, lambda path, key: str(hub.local_file(path, key, hub.download)))
        for name, path in roles.items():
            if not run.recipe:  # the run ends with the recipes that fit, which the configs tell
                hub.download(path, f"{name}.path", hub.CONFIGS, hub.PIPELINE)
            else:
                fetch_pipeline(path, f"{name}.path", networks_only=name != next(iter(method.roles)))
        for name, part in scorers.items():
            hub.download(part.path, f"{run.reward.key(name)}.path", KINDS[part.kind].files)
    mesh.barrier()
    run = _with_prompts(run, hub.pinned_file)
    for name, path in roles.items():
        folder = hub.cached(path, f"{name}.path", hub.CONFIGS, hub.PIPELINE)
        role: dict[str, Any] = {name: replace(run.roles[name], path=hub.pinned(path, folder))}
        run = replace(run, **role)
    for name, part in scorers.items():
        key = run.reward.key(name)
        folder = hub.cached(part.path, f"{key}.path", KINDS[part.kind].files)
        run = replace(run, reward=_with_path(run.reward, name, hub.pinned(part.path, folder)))
    return run


def local_prompts(run: RunConfig) -> RunConfig:
    """Return the run without the prompts that lie on the hub."""
    return _with_prompts(run, lambda path, _: "" if hub.is_hub_file(path) else path)


def _with_prompts(run: RunConfig, change: Callable[[str, str], str]) -> RunConfig:
    """Return the run with each path of prompts as `change` gives it, which takes the path and its flag."""
    validation = run.validation
    return replace(
        run,
        prompts=change(run.prompts, "--prompts"),
        validation=replace(
            validation,
            prompts=change(validation.prompts, "--validation.prompts"),
            sets={name: change(path, f"--validation.sets.{name}") for name, path in validation.sets.items()},
        ),
    )


def fetch_pipeline(path: str, key: str, *, networks_only: bool = False) -> str:
    """Download what a run reads of a pipeline on the hub, and return its id with the commit.

    That is the networks of the family, and unless `networks_only` is set text encoder, tokenizer, VAE and scheduler.
    """
    path = hub.pinned(path, hub.download(path, key, hub.CONFIGS, hub.PIPELINE))
    family, folder = family_of(key.removesuffix(".path"), path)
    networks, _ = family.networks(folder)
    index = read_json(folder / hub.INDEX)
    present = [name for name, entry in index.items() if isinstance(entry, list) and entry[0] is not None]
    wanted = [name for name in present if name in networks or not networks_only]
    patterns = (*hub.CONFIGS, *hub.component(*wanted))
    folder = hub.download(path, key, patterns)
    if missing := [name for name in wanted if not _whole(folder / name)]:
        why = f"the hub cannot be reached, and of {', '.join(missing)} the cache holds a part"
        raise MissingFileError(hub.absent(path, key, patterns, why))
    return path


def _whole(folder: Path) -> bool:
    """Return whether a component's folder has the files that its own index names, or some weights if it has a config.

    A cache that other programs filled does not say which files the repository has.
    """
    indices = list(folder.glob("*.safetensors.index.json"))
    named = [folder / file for index in indices for file in read_json(index).get("weight_map", {}).values()]
    if indices:
        return all(file.is_file() for file in named)
    return any(folder.glob("*.safetensors" if (folder / "config.json").is_file() else "*"))


def _on_hub(part: ScorerConfig) -> bool:
    return not part.python and part.kind in KINDS and bool(KINDS[part.kind].files) and hub.is_hub_id(part.path)


def _with_path(reward: RewardConfig, name: str, path: str) -> RewardConfig:
    if name == reward.first:
        return replace(reward, path=path)
    return replace(reward, scorers=reward.scorers | {name: replace(reward.scorers[name], path=path)})
