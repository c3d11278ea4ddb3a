"""Training processes of Ray that differ, or of which one fails, end as those of torchrun do."""

import re

import pytest
import unlike_on_ray
from helpers import SMALL, flags

from unified_trainer.run.settings.command_line import parse
from unified_trainer.run.workers import launch

pytestmark = pytest.mark.ranks


def ended(tmp_path, train) -> tuple[int | None, list[str]]:
    """What the launcher makes of two ranks, and what each of them said."""
    settings = {"launcher": "ray", "ray.ranks": 2, "algorithm.update-batch": 2, "algorithm.rollout-batch": 2}
    run = parse([*SMALL["dance_grpo"], *flags(settings | {"output": tmp_path / "run", "device": "cpu"})])
    with launch._processes(run, {"CPU": 1}) as processes:
        code = launch._run(processes, train, run, [str(tmp_path)])
    assert not (tmp_path / "run").exists()
    return code, [(tmp_path / str(rank)).read_text() for rank in range(2)]


def test_ranks_on_ray_that_differ_do_not_start(ray, tmp_path):
    code, texts = ended(tmp_path, unlike_on_ray.other_version)
    assert code == 2
    for rank, text in enumerate(texts):
        assert re.match(rf"error on rank {rank}: ranks diverged: the version of unified-trainer is .* 0 on", text), text


def test_a_rank_on_ray_that_fails_early_ends_the_others_and_nothing_starts_again(ray, tmp_path):
    """The thread of the other rank ends its process, which is no death that a new start could fix."""
    code, (first, second) = ended(tmp_path, unlike_on_ray.no_families)
    assert code == 2  # None would start all again
    assert second == "error on rank 1: no such family\n"
    assert first == "error on rank 0: rank 1 failed: no such family\n"
