"""Trajectories of a teacher from prompts, for the command preprocess: FastVideo's files of kind ode."""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.requests import Request
from unified_trainer.data.clips import DataConfig
from unified_trainer.data.fastvideo import ODE, ode_row, text_of, with_text
from unified_trainer.data.loader import make_batch
from unified_trainer.data.negative_prompt import use_negative_prompt, write_negative_prompt
from unified_trainer.models.base import Codec
from unified_trainer.models.folder import fingerprint
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.parallel.random import Streams
from unified_trainer.roles.role import Role
from unified_trainer.run.build import EMBEDDINGS
from unified_trainer.run.checkpoint.run_lock import claimed
from unified_trainer.run.load_roles import load_roles
from unified_trainer.run.plan.downloads import fetched
from unified_trainer.run.plan.plan import RunPlan, check
from unified_trainer.run.plan.roles import RolePlan
from unified_trainer.run.registry import family_of
from unified_trainer.run.settings.config import ConfigError, RunConfig
from unified_trainer.sampling.teacher_ode import TeacherODE
from unified_trainer.tools.output_folder import begin_output, check_output
from unified_trainer.tools.prepare.clip_folder import ABOUT, WHAT, ClipFolder, add_row, is_empty, summarise
from unified_trainer.tools.progress import ItemProgress

VERSION = 1


def write_trajectories(
    run: RunConfig, source: Path, out: Path, mesh: Mesh, *, every_state: bool, rows_per_file: int
) -> None:
    """Solve the teacher's ODE of a run once for each prompt of a file, and write the states that the run trains on.

    With `every_state` those of all steps are written. The noise is a function of the run's seed and of the prompt. What
    the training on these prompts would refuse is refused. Called again, it goes on with the prompts that are left.
    """
    ode = run.algorithm.teacher_ode(run.sampler)
    if ode is None:
        raise ConfigError(f"--trajectories: {run.method} trains on none; leave --method out")
    check_output(out, ABOUT, WHAT)
    plan = check(replace(fetched(run, mesh), prompts=str(source), data=DataConfig()), mesh)
    if any(request.negative for request in plan.requests):
        raise UserError(f"{source}: trajectories have one negative prompt: leave the column negative_prompt out")
    if any(request.actions for request in plan.requests):
        raise UserError(f"{source}: trajectories hold no actions: train ode_init on the prompts, with its teacher")
    ode = replace(ode, levels=ode.sigmas[:-1]) if every_state else ode
    with claimed(out, mesh):
        encoders = replace(run.encoders, cache=run.encoders.cache or str(out / EMBEDDINGS))
        codec, negative = plan.family.codec(plan.folder, mesh.device, encoders), run.sampler.negative_prompt
        begin_output(out, ABOUT, _about(plan, ode, codec), WHAT, empty=is_empty(out))
        written = ClipFolder(out, with_text(ODE, codec), rows_per_file)
        done = set(written.captions().values())
        left = [request.text for request in plan.requests if request.text not in done]
        reused = use_negative_prompt(out, negative, codec)
        # the text encoder leaves its memory to the teacher
        line = codec.encode_ahead([codec.negative(negative), *left], mesh)
        if not reused:
            write_negative_prompt(out, negative, codec)
        with ItemProgress("trajectories", len(left)) as progress:
            progress.say(line)
            try:
                if left:
                    teacher = load_roles({ode.role: plan.roles[ode.role]}, mesh)[ode.role]
                    _write(left, written, teacher, ode, plan, codec, progress)
            finally:
                written.finish()
            summarise(progress, len(done) + len(left), "trajectory", out, len(left))


def _write(
    prompts: Sequence[str],
    written: ClipFolder,
    teacher: Role,
    ode: TeacherODE,
    plan: RunPlan,
    codec: Codec,
    progress: ItemProgress,
) -> None:
    negative = plan.run.sampler.negative_prompt
    for prompt in prompts:
        digest = hashlib.sha256(prompt.encode()).hexdigest()[:16]
        noise = Streams(plan.run.seed, 0, teacher.device).noise("trajectory", [int(digest, 16)], plan.latent_shape)
        # One at a time: the rounding of a sample can depend on the other samples of a batch.
        batch = make_batch(codec, [Request(prompt)], negative, plan.latent_shape, prompt_ids=[0], sample_ids=[0])
        trajectory = ode.solve(teacher, noise, batch)
        text = text_of(codec.prompts([prompt])[0], codec, padded=True)
        add_row(written, ode_row(f"text_{digest}", prompt, trajectory) | text, progress)


def _about(plan: RunPlan, ode: TeacherODE, codec: Codec) -> dict[str, Any]:
    """Return what the rows depend on, besides the prompts."""
    run, teacher = plan.run, plan.roles[ode.role]
    size = {f"video.{name}": value for name, value in vars(run.video).items() if name != "fps"}
    return {
        "version": VERSION,
        "kind": "ode",
        "negative_prompt": run.sampler.negative_prompt,
        "text_encoder": codec.text_fingerprint,
        **size,
        ode.role: _identity(ode.role, teacher),
        f"{ode.role}.precision": teacher.config.precision,
        f"{ode.role}.boundary": teacher.layout.boundary,
        "guidance_scale": ode.guidance_scale,
        "sigmas": ode.sigmas.tolist(),
        "levels": ode.levels.tolist(),
        "seed": run.seed,
        "chunks": None if ode.made_in is None else asdict(ode.made_in),
    }


def _identity(name: str, plan: RolePlan) -> str:
    """Return a fingerprint of a role's networks and of the adapters that are merged into them."""
    _, folder = family_of(name, plan.path)
    networks = fingerprint(*(folder / component for component in plan.layout.components.values()))
    return f"{networks} {plan.config.adapter.sha256}".strip()
