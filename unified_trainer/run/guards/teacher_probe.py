"""Statistics of the student's samples next to those of the teacher's own, of the same prompts and noise."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from unified_trainer.basics.requests import Request
from unified_trainer.basics.types import PerSample, Video
from unified_trainer.data.loader import make_batch
from unified_trainer.data.tiny_world import SUBJECT_OF_CAPTION, is_tiny_world
from unified_trainer.data.tiny_world_measures import DISTANCES, DIVERSITY, attributes, world_distances
from unified_trainer.models.base import Codec
from unified_trainer.numerics.chunks import ChunkConfig
from unified_trainer.numerics.flow import GuidanceScale
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.meter import phase
from unified_trainer.parallel.random import Streams
from unified_trainer.rewards.pixels import diversity, motion_energy, saturation, thumbnail
from unified_trainer.roles.role import Role, Trainable
from unified_trainer.run.guards.distillation import LOOKS, DistillationGuardConfig
from unified_trainer.sampling.solver import SamplerConfig, generate

THUMBNAILS = "thumbnails"


class TeacherProbe:
    """Makes a few samples with the student and once with the teacher, and returns ratios of their statistics."""

    def __init__(
        self,
        config: DistillationGuardConfig,
        codec: Codec,
        teacher: Role,
        guidance_scale: GuidanceScale,
        sampler: SamplerConfig,
        requests: Sequence[Request],
        latent_shape: tuple[int, int, int, int],
        mesh: Mesh,
        *,
        seed: int,
        batch: int,
        ema: bool,
    ) -> None:
        """`sampler` is the student's, and `batch` the number of samples made at a time.

        The teacher follows its ODE over all frames at once, in `teacher_steps` steps with `guidance_scale`. With `ema`
        the student samples with its EMA weights, if it keeps any.
        """
        self._codec, self._teacher, self._latent_shape, self._mesh = codec, teacher, latent_shape, mesh
        self._sampler, self._seed, self._size, self._ema = sampler, seed, batch, ema
        self._requests = [
            request for request in list(requests)[: config.teacher_prompts] for _ in range(config.samples_per_prompt)
        ]
        self._teacher_sampler = replace(
            sampler,
            num_steps=config.teacher_steps,
            step_sigmas=(),
            solver="ode",
            guidance_scale=guidance_scale,
            chunks=ChunkConfig(),
        )
        self._reference: dict[str, float] = {}
        identities = [request.identity for request in self._requests]
        settings = json.dumps([identities, repr(self._teacher_sampler), seed, latent_shape, DISTANCES])
        self._of = hashlib.sha256(settings.encode()).hexdigest()  # what the reference was measured of

    @property
    def state(self) -> dict[str, Any]:
        """The teacher's statistics, as metadata of a checkpoint."""
        return {"teacher_reference": {"of": self._of, "values": dict(self._reference)}}

    def load_state(self, metadata: Mapping[str, Any]) -> None:
        """Take the teacher's statistics of a checkpoint, if they are of the same prompts, noise and settings."""
        held = metadata.get("teacher_reference", {})
        self._reference = dict(held["values"]) if held.get("of") == self._of else {}

    def run(self, student: Trainable) -> dict[str, float]:
        """Return NAME_to_teacher of the student's power, saturation, motion and diversity (a collective).

        In the tiny world its own measures are in place of saturation and motion, and diversity is world/diversity. Each
        is the student's value over the teacher's; of DISTANCES, which may be 0, minus the teacher's.
        """
        if not self._reference:
            with phase("teacher"):
                self._reference = self._measure(self._teacher, self._teacher_sampler)
        with student.sampling_weights(ema=self._ema):
            own = self._measure(student, self._sampler)
        both = self._reference.keys() & own.keys()
        ratios = {name: own[name] / self._reference[name] for name in LOOKS if name in both and self._reference[name]}
        further = {name: own[name] - self._reference[name] for name in DISTANCES if name in both}
        return {f"{name}_to_teacher": value for name, value in (ratios | further).items()}

    @torch.no_grad()
    def _measure(self, role: Role, sampler: SamplerConfig) -> dict[str, float]:
        """Return statistics of all samples; each rank makes equally many, the last ones perhaps a second time."""
        total, ranks = len(self._requests), self._mesh.data_size
        count = -(-total // ranks)
        mine = [(self._mesh.data_rank * count + i) % total for i in range(count)]
        parts: dict[str, list[Tensor]] = {}
        for start in range(0, count, self._size):
            samples = mine[start : start + self._size]
            x0, video = self._generate(role, sampler, samples)
            for name, rows in ({"power": x0.square().flatten(1).mean(1)} | self._looks(video, samples)).items():
                parts.setdefault(name, []).append(rows.to(self._mesh.device))
        columns = {name: self._mesh.gather(torch.cat(rows)).cpu().double()[:total] for name, rows in parts.items()}
        if THUMBNAILS in columns:
            spread, far = diversity(columns.pop(THUMBNAILS), self._requests), {}
        else:
            far = world_distances(columns, [request.text for request in self._requests])
            spread = far.pop(DIVERSITY, None)
        means = {name: rows.mean().item() for name, rows in columns.items()} | far
        return means if spread is None else means | {"diversity": spread}

    def _looks(self, video: Video, samples: list[int]) -> dict[str, PerSample]:
        """Return the attributes of samples in the tiny world, else statistics of their pixels and thumbnails."""
        texts = [request.text for request in self._requests]
        if is_tiny_world(video.shape[2:], texts):
            return attributes(video, [SUBJECT_OF_CAPTION[texts[i]] for i in samples])
        motion = {"motion": motion_energy(video)} if video.shape[2] > 1 else {}
        return {"saturation": saturation(video), THUMBNAILS: thumbnail(video)} | motion

    def _generate(self, role: Role, sampler: SamplerConfig, samples: list[int]) -> tuple[Tensor, Tensor]:
        """Return latents and videos; the noise of a sample is a function of the seed and its number."""
        requests = [self._requests[i] for i in samples]
        negative = self._sampler.negative_prompt
        batch = make_batch(self._codec, requests, negative, self._latent_shape, prompt_ids=samples, sample_ids=samples)
        streams = Streams(self._seed, 0, self._mesh.device)

        def draw(name: str) -> Tensor:
            return streams.noise(name, samples, self._latent_shape)

        x0 = generate(role, draw("guard"), batch, sampler, lambda s: draw(f"guard transition {s}"))
        with phase("decode"):
            return x0.float(), self._codec.decode(x0).float()
