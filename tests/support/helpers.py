"""Small real parts of the product, built in one place for all tests."""

import builtins
import contextlib
import errno
import fnmatch
import functools
import io
import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import av
import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import HuggingFaceStorageReader

from unified_trainer.__main__ import main
from unified_trainer.basics.requests import Request
from unified_trainer.data.clips import Clips
from unified_trainer.data.loader import Loader, make_batch
from unified_trainer.data.prompts import Prompts
from unified_trainer.methods.base import Method, MethodSetup
from unified_trainer.methods.dance_grpo import DanceGRPO, DanceGRPOConfig
from unified_trainer.methods.dance_ppo import DancePPO, DancePPOConfig
from unified_trainer.methods.distribution_matching import MatchingConfig
from unified_trainer.methods.dmd2 import DMD2
from unified_trainer.methods.finetune import Finetune, FinetuneConfig
from unified_trainer.methods.rl.rollout_config import RolloutConfig
from unified_trainer.methods.rl.rollouts import LocalRollouts
from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.models.wan.causal import CausalWanModel
from unified_trainer.models.wan.codec import WanCodec
from unified_trainer.models.wan.model import WanModel
from unified_trainer.parallel.fsdp import full
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.rewards.reward import Reward, RewardConfig, of_images
from unified_trainer.roles.adapter import AdapterConfig
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.causal import CausalStudent
from unified_trainer.roles.critic import Critic
from unified_trainer.roles.experts import ExpertLayout
from unified_trainer.roles.role import Frozen, RoleConfig, Trainable, TrainableConfig
from unified_trainer.roles.value import Value
from unified_trainer.run.checkpoint import dcp as checkpoint
from unified_trainer.run.registry import METHODS, TINY, method_named
from unified_trainer.run.trainer import Trainer
from unified_trainer.sampling.solver import SamplerConfig

REPO = Path(__file__).parents[2]
WAN, HPSV3 = TINY / "wan", TINY / "hpsv3"
CPU = torch.device("cpu")
ALONE = Mesh(CPU)
LATENT_SHAPE = (16, 2, 2, 2)  # of 5 frames of 32 x 32 pixels
CAPTIONS = ("a red circle moving left", "a blue square moving up", "a green triangle moving down", "yellow circle")


def flags(settings: dict[str, object]) -> list[str]:
    """Settings as flags; True is a switch that is turned on."""
    return [
        word
        for key, value in settings.items()
        for word in ([f"--{key}"] if value is True else [f"--{key}", str(value)])
    ]


SHORT = {"recipe": "tiny", "steps": 1, "validate-every": 0, "validation.num-samples": 2}
# Flags of the smallest run of each method; later flags win.
SMALL = {
    "dance_grpo": flags(
        {"method": "dance_grpo", "video.frames": 5, "video.height": 32, "video.width": 32, "sampler.num-steps": 4}
        | {"algorithm.num-prompts": 2, "algorithm.num-samples": 2, "algorithm.prompts-per-update": 2}
        | {"algorithm.rollout-batch": 4, "algorithm.update-batch": 4}
        | SHORT
    ),
    "dance_ppo": flags(
        {"method": "dance_ppo", "video.frames": 5, "video.height": 32, "video.width": 32, "sampler.num-steps": 4}
        | {"algorithm.num-prompts": 4, "algorithm.num-samples": 1, "algorithm.prompts-per-update": 2}
        | {"algorithm.rollout-batch": 4, "algorithm.update-batch": 4}
        | SHORT
    ),
    "finetune": flags(
        {"method": "finetune", "data.num-clips": 4, "sampler.num-steps": 2}
        | {"algorithm.batch-size": 2, "algorithm.micro-batch": 1}
        | SHORT
    ),
}


# Methods that always learn from clips, and from samples of their own: a table of settings gives each kind one row.
OF_CLIPS = tuple(name for name in METHODS if method_named(name).config_class.needs_clips is True)
OF_SAMPLES = tuple(name for name in METHODS if issubclass(method_named(name).config_class, RolloutConfig))


@functools.cache
def tiny_codec() -> WanCodec:
    return WanCodec.load(WAN, CPU, EncoderConfig())


def small_model(seed: int = 0, heads: int = 2, layers: int = 2) -> WanModel:
    """A fresh Wan transformer of few blocks, the same for the same seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = WanTransformer3DModel(
            patch_size=(1, 1, 1),
            num_attention_heads=heads,
            attention_head_dim=24 // heads,
            in_channels=16,
            out_channels=16,
            text_dim=32,
            freq_dim=16,
            ffn_dim=32,
            num_layers=layers,
            rope_max_seq_len=16,
        )
    return WanModel(network)


TWO_PROMPTS = ("a red circle moving left", "something else")
SHARP_AND_DARK = """
reward:
  kind: sharpness
  path: ''
  scale: 10
  scorers:
    dark: {kind: dark_share, weight: -2}
    motion_energy: {frames: all, weight: 0}
"""  # a file of a reward of three scorers


def small_pipeline(folder: Path) -> Path:
    """A pipeline folder at this path: the tiny world's with a transformer of two small blocks."""
    shutil.copytree(WAN, folder, ignore=shutil.ignore_patterns("transformer"))
    small_model().network.save_pretrained(folder / "transformer")
    return folder


def small_causal(seed: int = 0, heads: int = 2) -> CausalWanModel:
    """A fresh causal Wan transformer of two blocks, the same for the same seed."""
    return CausalWanModel(small_model(seed, heads).network)


class Recording(Trainable):
    """A role that keeps the gradient of every update, by its own names of weights, and moves only if asked to."""

    def __init__(self, name: str, backbone: Backbone, config: TrainableConfig, *, moves: bool = False) -> None:
        super().__init__(name, backbone, config)
        self.moves = moves
        self.gradients: list[dict[str, torch.Tensor]] = []

    def step(self) -> dict[str, float]:
        given = {key: p.grad for key, p in self.weights.items() if p.grad is not None}
        self.gradients.append({key: full(gradient).clone() for key, gradient in given.items()})
        if self.moves:
            return super().step()
        for p in self.weights.values():
            p.grad = None
        return {}


class RecordingStudent(Recording, CausalStudent):
    """A causal student that does."""


class RecordingCritic(Recording, Critic):
    """A critic that does."""


class RecordingValue(Recording, Value):
    """A value function that does."""


class Recorder(Recording):
    """The student of the small network, recording."""

    def __init__(self, role: TrainableConfig | None = None, *, moves: bool = False, mesh: Mesh = ALONE) -> None:
        backbone = Backbone(small_model(), mesh, trained=True)
        super().__init__("student", backbone, role or TrainableConfig(max_grad_norm=0.0), moves=moves)


def gradients(network: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The whole gradient of every weight that has one."""
    return {key: full(p.grad).clone() for key, p in network.named_parameters() if p.grad is not None}


def weights(network: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {key: full(p.detach()).clone() for key, p in network.named_parameters()}


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    """Bit for bit."""
    assert left.keys() == right.keys()
    for key in left:
        assert torch.equal(left[key], right[key]), key


def assert_one_training(one: Path, other: Path, step: int) -> None:
    """Two runs to this step, on other numbers of ranks: the norms of all gradients and the weights up to rounding."""
    for ours, theirs in zip(metrics_of(one), metrics_of(other), strict=True):
        norms = {key: value for key, value in ours.items() if key.endswith("grad_norm")}
        assert norms == pytest.approx({key: theirs[key] for key in norms}, rel=1e-2)
    ours, theirs = ({k: v for k, v in checkpoint_of(run, step).items() if "/weights/" in k} for run in (one, other))
    assert ours.keys() == theirs.keys()
    for key in ours:
        torch.testing.assert_close(theirs[key], ours[key], rtol=1e-3, atol=1e-4, msg=key)


def assert_near(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    """Every tensor within `tolerance` of the largest value of all; no gradient is lost, and they are not all zero."""
    assert left.keys() == right.keys()
    largest = max(float(value.abs().max()) for value in right.values())
    assert largest > 0
    for key in left:
        torch.testing.assert_close(left[key], right[key], rtol=tolerance, atol=tolerance * largest, msg=key)


@dataclass
class Calls:
    """What a network was asked: one row per call."""

    x_t: list[torch.Tensor] = field(default_factory=list)
    sigma: list[torch.Tensor] = field(default_factory=list)
    text: list[torch.Tensor] = field(default_factory=list)
    graph: list[bool] = field(default_factory=list)  # whether the call was made for a backward pass

    @classmethod
    def of(cls, role: Trainable) -> "Calls":
        """Listens to the role's network from now on."""
        calls = cls()

        def note(module, arguments):
            x_t, time, text = arguments
            calls.x_t.append(x_t.detach().clone())
            calls.sigma.append(time.double() / 1000)
            calls.text.append(text.detach().clone())
            calls.graph.append(torch.is_grad_enabled())

        role.network.register_forward_pre_hook(note)
        return calls

    def where(self, graph: bool) -> list[int]:
        return [i for i, has in enumerate(self.graph) if has is graph]


def mean_score(images, prompts):
    """Outside scorer of images: their mean plus a hundredth of the prompt's length."""
    return images.flatten(1).mean(1) + torch.tensor([len(prompt) / 100 for prompt in prompts])


def reward_of(scorer=mean_score, codec=None, **config) -> Reward:
    """A reward of one outside scorer of images."""
    config = RewardConfig(**{"kind": "mean_score"} | config)
    return Reward({config.kind: of_images(scorer, config.batch)}, codec or tiny_codec(), config)


class StubbornScorer:
    """Outside scorer of images: `mean_score`, but the same for every image of some prompts."""

    def __init__(self, prompts) -> None:
        self.prompts = prompts

    def __call__(self, images, prompts):
        scores = mean_score(images, prompts)
        scores[[prompt in self.prompts for prompt in prompts]] = 0.5
        return scores


class ScriptedScorer:
    """Outside scorer of images: hands out the given rewards in order, again from the start when they are used up."""

    def __init__(self, rewards, before=lambda: None) -> None:
        self.rewards, self.before, self.given = list(rewards), before, 0

    def __call__(self, images, prompts):
        self.before()
        values = [self.rewards[(self.given + i) % len(self.rewards)] for i in range(len(images))]
        self.given += len(images)
        return torch.tensor(values)


def small_batch(count: int = 2, **changes):
    """Conditions of `count` captions, no latents."""
    prompts = [CAPTIONS[i % len(CAPTIONS)] for i in range(count)]
    ids = list(range(count))
    return make_batch(tiny_codec(), Request.of(prompts), "", LATENT_SHAPE, prompt_ids=ids, sample_ids=ids, **changes)


def no_prompt():
    """The condition that guidance steers away from."""
    return tiny_codec().encode_text([""])


def trainable(name: str = "student", config: TrainableConfig | None = None, *, seed: int = 0) -> Trainable:
    """A role that trains all weights of a small network of its own."""
    config = config or TrainableConfig()
    backbone = Backbone(small_model(seed), ALONE, trained=True, recompute=config.activation_memory)
    return Trainable(name, backbone, config)


def random_clips(count: int) -> Clips:
    """Captions with random latents."""
    encoded = torch.randn(count, *LATENT_SHAPE, generator=torch.Generator().manual_seed(7))
    return Clips(tuple(CAPTIONS[i % 3] for i in range(count)), encoded)


def frozen(name: str, *, seed: int = 0) -> Frozen:
    """A role over a small network of its own that nobody moves."""
    return Frozen(name, Backbone(small_model(seed), ALONE), RoleConfig())


def finetune(config: FinetuneConfig, *, mesh: Mesh = ALONE, clips: int = 8, seed: int = 0, **recorder) -> Trainer:
    """A trainer of the small network on random latents; `trainer.roles["student"]` records."""
    student = Recorder(mesh=mesh, **recorder)
    method = Finetune(config, SamplerConfig(), student=student)
    loader = Loader(random_clips(clips), tiny_codec(), config.plan(), LATENT_SHAPE, "", seed, mesh)
    return Trainer(method, {"student": student}, loader, mesh, seed=seed)


def dance_grpo(
    config: DanceGRPOConfig,
    *,
    sampler: SamplerConfig = SamplerConfig(num_steps=4, guidance_scale=1.0),  # noqa: B008  (frozen)
    scorer=mean_score,
    reward: Reward | None = None,
    mesh: Mesh = ALONE,
    seed: int = 0,
    reference: Frozen | None = None,
    captions: tuple[str, ...] = CAPTIONS,
    **recorder,
) -> Trainer:
    """A trainer of the small network on the captions; `trainer.roles["student"]` records."""
    student = Recorder(mesh=mesh, **recorder)
    reward = reward or reward_of(scorer)
    loader = Loader(Prompts(Request.of(captions)), tiny_codec(), config.plan(), LATENT_SHAPE, "", seed, mesh)
    parts = reward_parts(DanceGRPO, config, sampler, student, reward, loader)
    method = DanceGRPO(config, sampler, student=student, reference=reference, **parts)
    return Trainer(method, {"student": student}, loader, mesh, seed=seed)


def dance_ppo(
    config: DancePPOConfig,
    *,
    sampler: SamplerConfig = SamplerConfig(num_steps=4, guidance_scale=1.0),  # noqa: B008  (frozen)
    scorer=mean_score,
    head: float = 0.0,
    mesh: Mesh = ALONE,
    seed: int = 0,
    role: TrainableConfig | None = None,
    moves: bool = False,
) -> Trainer:
    """A trainer of the small network and of a value function with a network of its own; both record.

    With a causal sampler the student is causal; the value function never is.
    `head` is the size of the weights that the value function's head starts with.
    """
    role = role or TrainableConfig(max_grad_norm=0.0)
    student: Trainable = Recorder(role, mesh=mesh, moves=moves)
    if sampler.chunks.causal:
        student = RecordingStudent("student", Backbone(small_causal(), mesh, trained=True), role, moves=moves)
    value = RecordingValue("value", Backbone(small_model(1), mesh, trained=True), role, moves=moves)
    for i, weight in enumerate(value._heads[""].parameters()):
        given = head * torch.randn(weight.shape, generator=torch.Generator().manual_seed(i))
        weight.data.copy_(replicated(given, weight))
    loader = Loader(Prompts(Request.of(CAPTIONS)), tiny_codec(), config.plan(), LATENT_SHAPE, "", seed, mesh)
    parts = reward_parts(DancePPO, config, sampler, student, reward_of(scorer), loader)
    method = DancePPO(config, sampler, student=student, value=value, **parts)
    return Trainer(method, {"student": student, "value": value}, loader, mesh, seed=seed)


def reward_parts(method, config, sampler: SamplerConfig, role, reward: Reward, loader: Loader) -> dict[str, object]:
    """What a method that learns from the rewards of its samples is given; the role makes them in this process."""
    sample = functools.partial(method.sample, config, sampler, role)
    rollouts = LocalRollouts(sample, reward, config.rollout_batch, config.trajectories)
    return {"reward": reward, "loader": loader, "rollouts": rollouts}


class WatchedRollouts:
    """Rollouts, and a list of the samples that they gave."""

    def __init__(self, rollouts) -> None:
        self.rollouts, self.seen, self.uniform, self.check = rollouts, [], rollouts.uniform, None

    def samples(self, batch, step, rng):
        self.seen.append(self.rollouts.samples(batch, step, rng))
        return self.seen[-1]

    def metrics(self):
        return self.rollouts.metrics()

    def lower_ahead(self):
        self.rollouts.lower_ahead()


FEW_STEPS = SamplerConfig(num_steps=4, shift=5.0, solver="sde", guidance_scale=1.0)


def adapted(mesh: Mesh = ALONE, *, checkpointing: bool = False, ranks: tuple[int, int] = (2, 3)) -> Backbone:
    """The small network with adapters of student and critic, both away from zero."""
    configs = {name: AdapterConfig(rank=rank) for name, rank in zip(("student", "critic"), ranks, strict=True)}
    model, random = small_model(), torch.Generator().manual_seed(5)
    backbone = Backbone(model, mesh, adapters=configs, recompute="full" if checkpointing else "none")
    for name in configs:
        for key, weight in backbone.weights(name).items():
            value = 0.3 * torch.randn(weight.shape, generator=random)
            if "lora_B" in key:
                weight.data.copy_(replicated(value, weight))
    return backbone


def replicated(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A whole value, sharded as another tensor is."""
    if not isinstance(like, torch.distributed.tensor.DTensor):
        return value
    return torch.distributed.tensor.distribute_tensor(value, like.device_mesh, like.placements)


def dmd2(
    config: MatchingConfig,
    *,
    kind: type[Method] = DMD2,
    sampler: SamplerConfig = FEW_STEPS,
    shared: bool = False,
    checkpointing: bool = False,
    role: TrainableConfig | None = None,
    moves: bool = False,
    mesh: Mesh = ALONE,
    seed: int = 0,
) -> Trainer:
    """A trainer of three small networks, or of one that they share by adapters; student and critic record.

    `kind` is dmd2, or another method with its roles.
    """
    if shared:
        names = dict.fromkeys(("student", "teacher", "critic"), adapted(mesh, checkpointing=checkpointing))
    else:
        recompute = "full" if checkpointing else "none"
        names = {
            name: Backbone(small_model(i), mesh, trained=name != "teacher", recompute=recompute)
            for i, name in enumerate(("student", "teacher", "critic"))
        }
    role = role or TrainableConfig(max_grad_norm=0.0)
    student = Recording("student", names["student"], role, moves=moves)
    critic = RecordingCritic("critic", names["critic"], role, moves=moves)
    for i, weight in enumerate(critic._heads[""].parameters()):  # at its start, zero, it teaches the student nothing
        value = torch.randn(weight.shape, generator=torch.Generator().manual_seed(i))
        weight.data.copy_(replicated(value, weight))
    method = kind(
        config, sampler, student=student, teacher=Frozen("teacher", names["teacher"], RoleConfig()), critic=critic
    )
    source = random_clips(8) if config.needs_clips else Prompts(Request.of(CAPTIONS))
    loader = Loader(source, tiny_codec(), config.plan(), LATENT_SHAPE, "", seed, mesh)
    return Trainer(method, {"student": student, "critic": critic}, loader, mesh, seed=seed)


def run(method: str, output: Path, *extra: str) -> None:
    """A small run in this process; it must end well."""
    assert main([*SMALL[method], "--output", str(output), *extra]) == 0


MACHINE = re.compile(r"^time$|per_second|seconds|memory|mfu")  # metrics that depend on the machine


def metrics_of(folder: Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl without what depends on the machine."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not MACHINE.search(key)} for line in lines]


def checkpoint_of(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole, whatever number of ranks wrote it."""
    saved = folder / "checkpoints" / f"step_{step}"
    tensors: dict[str, torch.Tensor] = {}
    for kind in sorted({file.parent for file in saved.rglob("*.safetensors")}):
        held = HuggingFaceStorageReader(str(kind)).read_metadata().state_dict_metadata
        tensors |= {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in held.items()}
    checkpoint.load(saved, tensors, ALONE)
    return tensors


def fill_disk(monkeypatch, *names: str) -> None:
    """From now on there is no space for files and folders of these names, below whatever folder."""

    def refused(file: object) -> bool:
        return isinstance(file, str | os.PathLike) and any(fnmatch.fnmatch(Path(file).name, name) for name in names)

    def patch(where: object, name: str, writes: Callable[..., bool]) -> None:
        original = vars(where)[name]

        def stand_in(file, *arguments, **more):
            if refused(file) and writes(*arguments, **more):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
            return original(file, *arguments, **more)

        monkeypatch.setattr(where, name, stand_in)

    for module in (builtins, io):
        patch(module, "open", lambda mode="r", *_, **__: bool({*mode} & {*"wax+"}))
    patch(av, "open", lambda *_, **__: True)
    patch(os, "open", lambda flags, *_, **__: bool(flags & os.O_CREAT))
    patch(os, "mkdir", lambda *_, **__: True)


def refused(capsys, *words: object) -> str:
    """What the program says when it refuses these words with exit code 2."""
    capsys.readouterr()
    assert main([*map(str, words)]) == 2
    return capsys.readouterr().err


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its content, to show that nothing was touched."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def copy_of(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to))


def cut_off(folder: Path, to: Path, step: int) -> Path:
    """A copy of a run that saved every step, as a kill leaves it after this step was saved."""
    shutil.copytree(folder, to, ignore=lambda _, names: [n for n in names if n == f"step_{step + 1}"])
    return to


def rewrite(file: Path, change) -> None:
    """Change the tensors of a safetensors file in place."""
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "unified_trainer", *words]


def environment(**extra: str) -> dict[str, str]:
    """The environment of a subprocess that finds this checkout's product."""
    return os.environ | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "WANDB_SILENT": "true"} | extra


WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
PORTS = range(20_000 + WORKER % 8, 32_000, 8)  # below those that a system gives to connections, and no other worker's
_ports = itertools.cycle([*PORTS[os.getpid() % len(PORTS) :], *PORTS[: os.getpid() % len(PORTS)]])


def free_port() -> int:
    """Where the ranks of a run can meet."""
    while True:
        with contextlib.closing(socket.socket()) as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", next(_ports)))
            return listener.getsockname()[1]


def shell(*words: str, cwd: Path = REPO, **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=cwd, env=environment(**extra), capture_output=True, text=True, timeout=300)


def read_until(process: subprocess.Popen[str], pattern: str) -> str:
    """Read what a process prints up to a line with the pattern, and return it; fail if the process ends before."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if re.search(pattern, line):
            return "".join(lines)
    raise AssertionError("".join(lines))


def setup_of(
    sampler: SamplerConfig, layouts: dict[str, ExpertLayout] | None = None, **roles: RoleConfig
) -> MethodSetup:
    """What a method's check reads: by default one network for every role, all of them trained."""
    one = ExpertLayout(None, {"": "transformer"}, ("",))
    names = ("student", "teacher", "critic", "value", "reference", "old")
    configs = {name: roles.get(name, TrainableConfig()) for name in names}
    return MethodSetup(sampler, configs, {name: one for name in names} | (layouts or {}))
