"""The kinds of scorers, and a reward's scorers checked and loaded from its settings."""

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch

from unified_trainer import rewards
from unified_trainer.basics.errors import UserError
from unified_trainer.basics.plugins import installed, load_object
from unified_trainer.basics.secrets import check_secret
from unified_trainer.basics.types import Video
from unified_trainer.models import hub
from unified_trainer.models.prompt_lengths import cut_in_words
from unified_trainer.rewards.base import (
    ApartScorer,
    Features,
    LatentScorer,
    NetworkScorer,
    PromptRules,
    RewardConfig,
    Scorer,
    ScorerConfig,
    ScorerKind,
    check_no_weights,
    with_images,
)
from unified_trainer.rewards.offloaded import OffloadedScorer
from unified_trainer.rewards.own_settings import ScorerSettings, for_class, kind_of
from unified_trainer.rewards.scorer_child import asks_for_images
from unified_trainer.rewards.scorer_pool import in_pool
from unified_trainer.rewards.scorer_process import ScorerProcess, check_own_python
from unified_trainer.rewards.time_limit import limited

OF_PIXELS = "sharpness motion_smoothness saturation dark_share edge_density motion_energy temporal_flickering"
OWN = "hpsv3 videoalign hpsv2 clip aesthetic background_consistency subject_consistency ocr vlm vlm_pairs"
MODULES = {  # of the kinds by name
    **{name: name for name in OWN.split()},
    **dict.fromkeys([*OF_PIXELS.split(), "first_frame_likeness"], "pixels"),
    "http": "remote",
}


class _Kinds(Mapping[str, ScorerKind]):
    """The kinds of this package by name; the module of one is imported when it is asked for."""

    def __getitem__(self, name: str) -> ScorerKind:
        found = vars(importlib.import_module(f"{rewards.__name__}.{MODULES[name]}")).values()
        return next(kind for kind in found if isinstance(kind, ScorerKind) and kind.name == name)

    def __iter__(self) -> Iterator[str]:
        return iter(MODULES)

    def __len__(self) -> int:
        return len(MODULES)


KINDS = _Kinds()


def scorer_kind(config: ScorerConfig, key: str, timeout: float) -> ScorerKind:
    """Return the kind that the settings name: one of `KINDS`, or an object outside this package.

    A kind of an installed package, or of the form package.module:NAME or path/to/file.py:NAME, is a ScorerKind, a class
    derived from ScorerSettings, another class, which is called with its settings and whose object scores, or a function
    of videos and prompts without weights and settings. With a Python or processes of its own, the file is not executed
    in this process, and the scorer has `timeout` seconds for each answer. Raise UserError, naming the key, if there is
    no such kind.
    """
    known, load = KINDS.get(config.kind), partial(ScorerProcess, key=key, timeout=timeout)
    if config.python or (config.processes and not (known and known.program)):
        known = ScorerKind(config.kind, load, check_own_python, own_settings=True, own_timeout=True, apart=True)
        known = replace(known, program=config.kind)
    if known:
        return in_pool(known, config, key, timeout)
    offered = installed("scorers")
    if ":" not in config.kind and config.kind not in offered:
        have = ", ".join([*sorted(KINDS), *offered])
        raise UserError(f"{key}.kind {config.kind} is no scorer; have {have}, or path/to/file.py:NAME for one of yours")
    found = _loaded(offered.get(config.kind, config.kind), key, config.kind)
    if isinstance(found, ScorerKind):
        return found
    if isinstance(found, type) and issubclass(found, ScorerSettings):
        return kind_of(config.kind, found)
    if isinstance(found, type) and any("__call__" in vars(base) for base in found.__mro__):
        return ScorerKind(
            config.kind, lambda own, device: _plain(found(for_class(own, device))), lambda *_: None, own_settings=True
        )
    if not callable(found) or isinstance(found, type):
        raise UserError(
            f"{key}.kind {config.kind} is a {type(found).__name__}; expected a function of videos and prompts, a class "
            "with __call__, a class derived from ScorerSettings, or a ScorerKind"
        )
    try:
        inspect.signature(found).bind("videos", "prompts", **({"images": None} if asks_for_images(found) else {}))
    except TypeError as error:
        raise UserError(f"{key}.kind {config.kind} must take two arguments, videos and prompts: {error}") from error
    except ValueError:
        pass  # a function of C without a signature
    return ScorerKind(config.kind, lambda _config, _device: _plain(found), check_no_weights)


def _loaded(spec: str, key: str, kind: str) -> Any:
    try:
        return load_object(spec, f"{key}.kind", kind)
    except ModuleNotFoundError as error:
        if not isinstance(error, UserError):
            error.add_note(f"install {error.name} here, or set {key}.python to a Python that has it (docs/rewards.md)")
        raise


def check_reward(config: RewardConfig, frames: int) -> None:
    """Raise UserError, naming the key, for scorers that cannot be, of videos of `frames` frames; no weight is read."""
    config.check()
    for name, part in config.named().items():
        key = config.key(name)
        kind = scorer_kind(part, key, config.timeout)
        if part.settings and not kind.own_settings:
            raise UserError(f"{key}.settings.{next(iter(part.settings))}: {part.kind} has no settings of its own")
        for own, value in part.settings.items():
            check_secret(f"{key}.settings.{own}", value)
        if part.top_fraction != 1 and not kind.per_frame:
            raise UserError(f"{key}.top_fraction: {part.kind} does not score frames one by one; leave it out")
        kind.check(part, key, frames)
        _check_device(part.device, key)
        scored = max(1, -(-frames // part.stride(frames)))
        if scored < kind.min_frames:
            raise UserError(
                f"{key}: {part.kind} needs at least {kind.min_frames} frames of a video, but sees {scored}; set "
                f"{key}.frames all"
            )


def group_scorer(config: RewardConfig) -> str:
    """Return the setting of the first scorer with a weight that compares the samples of a prompt; "" if none does."""
    keys = {config.key(name): part for name, part in config.named().items() if part.weight}
    return next((key for key, part in keys.items() if scorer_kind(part, key, config.timeout).of_groups), "")


def check_of_videos(config: RewardConfig) -> None:
    """Raise UserError, naming the key, for a scorer that reads latents: a file or a server has videos alone."""
    for name, part in config.named().items():
        if scorer_kind(part, config.key(name), config.timeout).of_latents:
            raise UserError(f"{config.key(name)}: {part.kind} reads latents, but here are videos alone: leave it out")


def least_frames(config: RewardConfig) -> int:
    """Return how many frames a video must have, so that every scorer sees as many as it needs."""
    needed = [1]
    for name, part in config.named().items():
        least = scorer_kind(part, config.key(name), config.timeout).min_frames
        needed.append(1 + (least - 1) * part.stride(least))
    return max(needed)


def load_scorers(
    config: RewardConfig, device: torch.device, limit: Callable[[Scorer, float, str], Scorer] = limited
) -> tuple[dict[str, Scorer], Features | None]:
    """Load every scorer by its name, held-out ones too, and the image features of the first that has some.

    A scorer runs on `device` unless its settings name another one. `limit` gives a scorer without a timeout of its own
    that of the reward, in seconds; it also gets the scorer's setting, for messages. With `config.offload`, one that
    declares its networks is an OffloadedScorer. Raise UserError for weights that are missing or damaged.
    """
    scorers: dict[str, Scorer] = {}
    features: Features | None = None
    for name, part in config.named().items():
        kind = scorer_kind(part, config.key(name), config.timeout)
        part = _with_files(part, config.key(name), kind)
        place = torch.device(part.device) if part.device else device
        loaded = kind.load(part, place)
        own = kind.features(loaded) if kind.features is not None else None
        scorer = with_images(loaded)
        if kind.of_latents and scorer is not loaded:
            raise UserError(f"{config.key(name)}: {part.kind} reads latents, so it cannot ask for images")
        scorers[name] = scorer if kind.own_timeout else limit(scorer, config.timeout, config.key(name))
        if kind.apart:
            scorers[name] = ApartScorer(scorer)
        if kind.of_latents:
            scorers[name] = LatentScorer(scorers[name])
        elif config.offload and isinstance(loaded, NetworkScorer):
            scorers[name] = offloaded = OffloadedScorer.of(scorers[name], loaded.networks, place)
            own = offloaded.features(own) if own is not None else None
        features = features or own
    return scorers, features


def check_prompts(config: RewardConfig, *sources: tuple[Sequence[str], Callable[[int], str]]) -> list[str]:
    """Return a line for each scorer that cuts prompts; UserError for a prompt that a scorer cannot score.

    Each source is prompts, and a function that gives the place of one by its number, for the message. Tokenizers are
    read, but no weights.
    """
    notes = []
    for name, part in config.named().items() if any(prompts for prompts, _ in sources) else ():
        kind = scorer_kind(part, config.key(name), config.timeout)
        rules = kind.prompt_rules(_with_files(part, config.key(name), kind)) if kind.prompt_rules else PromptRules()
        for prompts, place in sources:
            for number, prompt in enumerate(prompts):
                cleaned = rules.cleaned(prompt)
                if found := next((token for token in rules.special if token in cleaned), None):
                    raise UserError(f"{place(number)} holds {found}, a special token of the scorer {name}: remove it")
                if fault := rules.fault(prompt):
                    raise UserError(f"{place(number)} {fault}")
            notes.append(cut_in_words(rules.cut, prompts, place, f"the scorer {name}") if rules.cut else "")
    return list(filter(None, notes))


def check_files(config: RewardConfig, name: str) -> None:
    """Raise UserError for a folder of a scorer that lacks files; no weights are read, and nothing is downloaded."""
    part = config.named()[name]
    kind = scorer_kind(part, config.key(name), config.timeout)
    if kind.prompt_rules is not None and part.path and not (kind.files and hub.is_hub_id(part.path)):
        kind.prompt_rules(part)


def _with_files(part: ScorerConfig, key: str, kind: ScorerKind) -> ScorerConfig:
    """Return the settings with a folder in place of a hub id."""
    if not (kind.files and hub.is_hub_id(part.path)):
        return part
    return replace(part, path=str(hub.download(part.path, f"{key}.path", kind.files)))


def _plain(scorer: Callable[..., Any]) -> Scorer:
    """Return a user's scorer, which may give a tensor, an array or a list, as one that gives a tensor."""

    @wraps(scorer, updated=())  # with its signature
    def scored(video: Video, prompts: Sequence[str], **images: Any) -> Any:
        given = scorer(video, prompts, **images)
        try:
            return torch.as_tensor(given)
        except (RuntimeError, TypeError, ValueError):
            return given  # what is no numbers is refused with the scorer's name

    return scored


def _check_device(device: str, key: str) -> None:
    try:
        torch.device(device or "cpu")
    except RuntimeError as error:
        raise UserError(f"{key}.device {device!r} is no device that torch knows") from error
