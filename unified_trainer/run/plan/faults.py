"""All that a run lacks, in one error: the other checks of a run that failed one."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from unified_trainer.basics.errors import UserError
from unified_trainer.data.buckets import sizes_of
from unified_trainer.data.parquet_files import read_stored_files
from unified_trainer.data.prompts import prompts_of
from unified_trainer.data.raw_clips import check_videos, holds_videos
from unified_trainer.data.row_kinds import ClipRows
from unified_trainer.models import hub
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.rewards.scorers import check_files, check_reward
from unified_trainer.run.plan.data import validation_sets
from unified_trainer.run.plan.downloads import local_prompts
from unified_trainer.run.plan.guards import check_guards, check_worker_packages, check_workers
from unified_trainer.run.registry import family_of, method_named
from unified_trainer.run.settings.batch import with_fitting_batch
from unified_trainer.run.settings.config import RunConfig


def with_others(first: UserError, run: RunConfig, mesh: Mesh) -> UserError:
    """Return the error of a check with those of all that do not depend on it, a line each; alone it stays itself."""
    faults = {str(first): None}
    for check in _independent(run, mesh):
        try:
            check()
        except UserError as error:
            faults.setdefault(str(error))
    return first if len(faults) == 1 else UserError("\n- ".join([f"{len(faults)} faults:", *faults]))


def _independent(run: RunConfig, mesh: Mesh) -> Iterator[Callable[[], object]]:
    """Yield checks of settings and of local files that need no other one to pass; nothing is downloaded."""
    method, run = method_named(run.method), local_prompts(run)
    for name, config in run.roles.items():
        if run.needs_role(name) and config.path and not hub.is_hub_id(config.path):
            yield partial(family_of, name, config.path)
    yield partial(check_reward, run.reward, run.video.frames)
    for name in run.reward.named():
        yield partial(check_files, run.reward, name)
    if run.trains_on == "prompts" and run.prompts:
        yield partial(prompts_of, run.prompts, (), "--prompts", run.prompts_column)
    if run.validation.prompts:
        column = run.validation.prompts_column
        yield partial(prompts_of, run.validation.prompts, (), "--validation.prompts", column)
    yield partial(validation_sets, run)
    if run.trains_on != "prompts" and run.data.path not in ("", "tiny"):
        yield partial(_check_clips, run)
    yield run.sampler.check
    yield partial(check_guards, run, method)
    yield partial(check_workers, run, method)
    yield partial(check_worker_packages, run, mesh.device.type)
    yield lambda: with_fitting_batch(run, mesh.data_size)[0].algorithm.plan().table(mesh.data_size)


def _check_clips(run: RunConfig) -> None:
    """Raise UserError for data.path as far as it can be checked without the student's folder."""
    path = Path(run.data.path)
    if run.trains_on == "clips" and holds_videos(path):
        check_videos(path, sizes_of(run.data, run.video), run.data.columns)
    elif not path.exists():
        read_stored_files(path, ClipRows((1, 1, 1, 1)))
