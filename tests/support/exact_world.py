"""A finite world with an exact teacher: a few templates of each class, and the posterior mean in closed form.

x0 is one of the templates of its class, each equally likely, so that with x_t = (1 - sigma) x0 + sigma noise
E[x0 | x_t] = sum_k p_k T_k, p = softmax(-|x_t - (1 - sigma) T_k|^2 / (2 sigma^2)) over the templates of the class.
"""

import contextlib
import copy
import dataclasses
import functools
from contextlib import contextmanager
from pathlib import Path

import torch
from helpers import ALONE
from torch import nn

from unified_trainer.basics.requests import Request
from unified_trainer.basics.types import Condition
from unified_trainer.data.loader import Loader, make_batch
from unified_trainer.data.prompts import Prompts
from unified_trainer.methods.dmd2 import DMD2, DMD2Config
from unified_trainer.numerics.flow import add_noise, guide, shift_sigma
from unified_trainer.numerics.frechet import frechet_distance
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.critic import Critic
from unified_trainer.roles.role import Frozen, Role, RoleConfig, Trainable, TrainableConfig
from unified_trainer.run.trainer import Trainer
from unified_trainer.sampling.solver import SamplerConfig, generate

SHAPE, CLASSES, EACH = (2, 1, 2, 2), 3, 4
SIZE, ANY = 8, CLASSES  # ANY is the class of the unconditional prediction
PROMPTS = tuple(f"class {i}" for i in range(CLASSES))
SAMPLER = SamplerConfig(num_steps=2, shift=5.0, solver="sde", guidance_scale=1.0)


class ClassCodec:
    """A codec whose prompts are "class 0" and so on; the empty prompt is any class."""

    folder = Path()
    text_fingerprint = video_fingerprint = "classes"
    text_shapes = {"label": (1,)}
    causal = True

    def latent_shape(self, frames, height, width):
        return SHAPE

    def prompts(self, *_):
        raise NotImplementedError("classes are not stored in files")

    remember = text_condition = text_difference = cut = prompts

    def encode_text(self, prompts):
        return Condition({"label": torch.tensor([int(prompt[-1]) if prompt else ANY for prompt in prompts])})

    def negative(self, prompt):
        return prompt

    def encode_ahead(self, prompts, mesh):
        return "classes need no text encoder"

    def in_use(self):
        return contextlib.nullcontext()

    def encode(self, video):
        return video

    encode_raw = encode

    def normalise(self, raw):
        return raw

    raw = normalise

    def decode(self, latents):
        return latents

    def decoder(self):
        return self.decode


@functools.cache
def templates() -> torch.Tensor:
    """Return the templates class by class: four directions around the center of each class."""
    random = torch.Generator().manual_seed(0)
    centers = torch.randn(CLASSES, 1, *SHAPE, generator=random)
    around = torch.randn(CLASSES, EACH, *SHAPE, generator=random)
    return (0.6 * centers + 0.8 * around).flatten(0, 1)


class Model:
    """A network of (x_t, sigma, label) as a velocity field."""

    adapter_layers = ("0", "2")
    new_layers = ()
    pass_share = {}
    feature_size = 128

    def __init__(self, network: nn.Module) -> None:
        self.network = network

    def guide(self, cond, uncond, guidance_scale):
        return guide(cond, uncond, guidance_scale)

    @property
    def blocks(self):
        return ()

    def velocity(self, x_t, sigma, cond):
        return self.network(x_t, sigma.float(), cond["label"])

    @contextmanager
    def features(self, *, alone=False):
        seen = []
        handle = self.network.layers[1].register_forward_hook(lambda _m, _i, output: seen.append(output[:, None]))
        yield seen
        handle.remove()

    def read(self, mesh, merged=None):
        """Do nothing: the weights are in memory."""

    def share_tokens(self, mesh):
        raise NotImplementedError

    def example(self, shape=None, samples=1, text_tokens=4):
        raise NotImplementedError

    def save(self, folder, component, dtype):
        raise NotImplementedError

    def compiled_inputs(self, *inputs):
        raise NotImplementedError


class Posterior(nn.Module):
    """The exact velocity (x_t - E[x0 | x_t]) / sigma."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("templates", templates().flatten(1))

    def forward(self, x_t, sigma, label):
        sigma, x = sigma[:, None], x_t.flatten(1)
        distance = (x[:, None] - (1 - sigma[:, None]) * self.templates).square().sum(-1)
        other = (torch.arange(CLASSES * EACH, device=x.device) // EACH != label[:, None]) & (label[:, None] != ANY)
        posterior = (-distance / (2 * sigma**2)).masked_fill(other, -torch.inf).softmax(-1)
        x0 = (posterior @ self.templates).view_as(x_t)
        return (x_t - x0) / sigma.view(-1, *[1] * (x_t.ndim - 1))


class Learner(nn.Module):
    """A network of three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.label = nn.Embedding(CLASSES + 1, 16)
        self.layers = nn.ModuleList([nn.Linear(SIZE + 32, 128), nn.Linear(128, 128), nn.Linear(128, 128)])
        self.out = nn.Linear(128, SIZE)

    def forward(self, x_t, sigma, label):
        waves = sigma[:, None] * torch.arange(1, 9, device=sigma.device) * torch.pi / 2
        h = torch.cat([x_t.flatten(1), waves.sin(), waves.cos(), self.label(label)], 1)
        for layer in self.layers:
            h = nn.functional.silu(layer(h))
        return self.out(h).view_as(x_t)


def role(kind: type[Role], name: str, network: nn.Module, config: RoleConfig) -> Role:
    return kind(name, Backbone(Model(network), ALONE, trained=kind is not Frozen), config)


@functools.cache
def pretrained() -> Learner:
    """Return a learner after flow matching on the templates; student and critic start from it."""
    torch.manual_seed(0)
    network, labels = Learner(), torch.arange(CLASSES * EACH) // EACH
    optimizer = torch.optim.Adam(network.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=400)
    for _ in range(400):
        rows = torch.randint(CLASSES * EACH, (96,))
        x0, noise, sigma = templates()[rows], torch.randn(96, *SHAPE), shift_sigma(torch.rand(96), 3.0)
        error = network(add_noise(x0, noise, sigma), sigma, labels[rows]) - (noise - x0)
        optimizer.zero_grad()
        error.square().mean().backward()
        optimizer.step()
        schedule.step()
    return network


def distillation(*, critic_rate: float = 3e-3, seed: int = 0) -> Trainer:
    """Return DMD2 with the exact teacher: 60 steps of the critic alone, then a student update in every fifth step."""
    config = DMD2Config(batch_size=60, micro_batch=60, guidance_scale=1.0, critic_warmup_steps=60, tau_shift=2.0)
    adam = TrainableConfig(learning_rate=2e-3, betas=(0.0, 0.99))
    student = dataclasses.replace(adam, lr_schedule="linear", lr_decay_updates=60, min_lr_ratio=0.1)
    critic = dataclasses.replace(adam, learning_rate=critic_rate)
    roles = {
        "student": role(Trainable, "student", copy.deepcopy(pretrained()), student),
        "teacher": role(Frozen, "teacher", Posterior(), RoleConfig()),
        "critic": role(Critic, "critic", copy.deepcopy(pretrained()), critic),
    }
    method = DMD2(config, SAMPLER, **roles)
    loader = Loader(Prompts(Request.of(PROMPTS)), ClassCodec(), config.plan(), SHAPE, "", seed, ALONE)
    return Trainer(method, {name: roles[name] for name in ("student", "critic")}, loader, ALONE, seed=seed)


def samples(student: Role, sampler: SamplerConfig = SAMPLER, count: int = 1200) -> torch.Tensor:
    """Return flattened samples, an equal number of each class."""
    ids, streams = list(range(count)), Streams(99, 0)
    codec, prompts = ClassCodec(), [PROMPTS[i % CLASSES] for i in ids]
    batch = make_batch(codec, Request.of(prompts), "", SHAPE, prompt_ids=ids, sample_ids=ids)
    start = streams.noise("start", ids, SHAPE)
    return generate(student, start, batch, sampler, lambda s: streams.noise(str(s), ids, SHAPE)).flatten(1)


def distance(student: Role, sampler: SamplerConfig = SAMPLER) -> float:
    """Return the Frechet distance of the student's samples to the templates."""
    drawn = samples(student, sampler)
    return frechet_distance(drawn, templates().flatten(1).repeat(len(drawn) // len(templates()), 1))


def right_class(student: Role) -> float:
    """Return the fraction of samples whose nearest template is of the prompt's class."""
    nearest = torch.cdist(samples(student), templates().flatten(1)).argmin(1) // EACH
    return float((nearest == torch.arange(len(nearest)) % CLASSES).double().mean())
