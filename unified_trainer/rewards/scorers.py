"""The kinds of scorers, and a reward's scorers checked and loaded from its settings."""

import importlib
import pkgutil
from functools import partial

import torch

from unified_trainer import rewards
from unified_trainer.errors import UserError
from unified_trainer.plugins import load_object
from unified_trainer.rewards.base import Features, RewardConfig, Scorer, ScorerConfig, ScorerKind, check_no_weights
from unified_trainer.rewards.scorer_process import ScorerProcess, check_own_python


def _kinds() -> dict[str, ScorerKind]:
    """Collect the kinds that the modules of this package define, by name."""
    kinds: dict[str, ScorerKind] = {}
    for module in pkgutil.iter_modules(rewards.__path__, f"{rewards.__name__}."):
        if module.name == __name__:
            continue
        for found in vars(importlib.import_module(module.name)).values():
            if isinstance(found, ScorerKind) and kinds.setdefault(found.name, found) is not found:
                raise ValueError(f"{module.name}: another scorer is named {found.name}")
    return kinds


KINDS: dict[str, ScorerKind] = _kinds()


def scorer_kind(config: ScorerConfig, key: str, timeout: float) -> ScorerKind:
    """Return the kind that the settings name: one of `KINDS`, or an object outside this package.

    A kind of the form package.module:NAME or path/to/file.py:NAME is a ScorerKind, or a function of videos and prompts
    that has no weights. With a Python of its own, the file is not executed in this process, and the scorer has
    `timeout` seconds for each answer. Raise UserError, naming the key, if there is no such kind.
    """
    if config.python:
        return ScorerKind(config.kind, partial(ScorerProcess, key=key, timeout=timeout), check_own_python)
    if config.kind in KINDS:
        return KINDS[config.kind]
    if ":" not in config.kind:
        raise UserError(
            f"{key}.kind {config.kind} is no scorer; have {', '.join(KINDS)}, or path/to/file.py:NAME for one of yours"
        )
    found = load_object(config.kind, f"{key}.kind")
    if isinstance(found, ScorerKind):
        return found
    if not callable(found) or isinstance(found, type):
        raise UserError(
            f"{key}.kind {config.kind} is a {type(found).__name__}; expected a ScorerKind, or a function of videos and "
            "prompts"
        )
    return ScorerKind(config.kind, lambda _config, _device: found, check_no_weights)


def check_reward(config: RewardConfig, frames: int) -> None:
    """Raise UserError, naming the key, for scorers that cannot be, of videos of `frames` frames; no weight is read."""
    config.check()
    for name, part in config.named().items():
        key = config.key(name)
        kind = scorer_kind(part, key, config.timeout)
        kind.check(part, key, frames)
        _check_device(part.device, key)
        scored = max(1, -(-frames // part.stride(frames)))
        if scored < kind.min_frames:
            raise UserError(
                f"{key}: {part.kind} needs at least {kind.min_frames} frames of a video, but sees {scored}; set "
                f"{key}.frames all"
            )


def load_scorers(config: RewardConfig, device: torch.device) -> tuple[dict[str, Scorer], Features | None]:
    """Load every scorer by its name, held-out ones too, and the image features of the first that has some.

    A scorer runs on `device` unless its settings name another one. Raise UserError for weights that are missing or
    damaged.
    """
    scorers: dict[str, Scorer] = {}
    features: Features | None = None
    for name, part in config.named().items():
        kind = scorer_kind(part, config.key(name), config.timeout)
        scorers[name] = kind.load(part, torch.device(part.device) if part.device else device)
        if features is None and kind.features is not None:
            features = kind.features(scorers[name])
    return scorers, features


def _check_device(device: str, key: str) -> None:
    try:
        torch.device(device or "cpu")
    except RuntimeError as error:
        raise UserError(f"{key}.device {device!r} is no device that torch knows") from error
