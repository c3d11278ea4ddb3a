"""A pool of processes: scores are those of this process, sampling goes on beside it, and nothing stays behind."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import psutil
import pytest
import torch
from helpers import CPU, LATENT_SHAPE, small_batch, tiny_codec

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.types import Rollout
from unified_trainer.methods.rl.rollouts import LocalRollouts
from unified_trainer.parallel.random import Streams
from unified_trainer.rewards.base import RewardConfig, ScorerConfig
from unified_trainer.rewards.reward import Reward
from unified_trainer.rewards.scorer_pool import processes_of
from unified_trainer.rewards.scorer_process import ScorerError
from unified_trainer.rewards.scorers import KINDS, check_reward, load_scorers, scorer_kind

FILE = """
import os
import signal
from pathlib import Path

import torch

FOLDER = Path(__file__).parent


def score(videos, prompts):
    first = prompts[0]
    if "red" in first and (FOLDER / "sampled").exists():
        (FOLDER / "sampled").read_text()  # a pipe: until the next part is sampled
    if "dies" in first and (FOLDER / "alive").exists():
        (FOLDER / "alive").unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    if "hidden" in first:
        from unified_trainer.basics.errors import UnscoredError

        raise UnscoredError("the face is hidden", [None])
    if "wrong" in first:
        return {}[first]
    if "hangs" in first:
        (FOLDER / "pid").write_text(str(os.getpid()))
        signal.pause()
    if "where" in first:
        return [torch.get_num_threads() if os.environ["CUDA_VISIBLE_DEVICES"] == "" else 0]
    return [float(video.double().mean()) + len(prompt) for video, prompt in zip(videos, prompts)]
"""
VIDEO = torch.rand(3, 3, 2, 4, 4, generator=torch.Generator().manual_seed(0))
CONFIG = RewardConfig(frames="all", retries=1, timeout=120.0, unscored=0.5, processes=2)


def loaded(config: RewardConfig) -> Reward:
    check_reward(config, 5)
    return Reward(load_scorers(config, CPU)[0], tiny_codec(), config)


def both(parts: Reward, alone: Reward, *prompts: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The scores of videos with these prompts in the pool, and in this process."""
    return tuple(reward.parts(VIDEO, prompts, ["score"])[:, 0] for reward in (parts, alone))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pool")
    (folder / "own.py").write_text(FILE)
    return folder


@pytest.fixture(scope="module")
def alone(folder):
    return loaded(replace(CONFIG, kind=f"{folder / 'own.py'}:score", processes=0))


@pytest.fixture(scope="module")
def pooled(folder):
    reward = loaded(replace(CONFIG, kind=f"{folder / 'own.py'}:score"))
    yield reward
    reward.close()


@pytest.mark.slow
def test_the_next_part_is_sampled_while_one_is_scored_and_the_scores_are_those_of_this_process(folder, pooled, alone):
    """The score of the first sample waits for the sampling of the second part, which waits for that score to begin."""
    os.mkfifo(folder / "sampled")

    def sample(batch, step, rng):
        if batch.sample_ids[0] == 2 and (folder / "sampled").exists():
            (folder / "sampled").write_text("now")
            (folder / "sampled").unlink()
        return Rollout.from_x0(rng.noise("x0", batch.sample_ids, LATENT_SHAPE))

    found, expected = (
        LocalRollouts(sample, reward, 2).samples(small_batch(6), 0, Streams(0, 0)).scores for reward in (pooled, alone)
    )
    assert torch.equal(found.parts, expected.parts) and len(found.parts.unique()) == 6
    assert torch.equal(found.thumbnails, expected.thumbnails)


@pytest.mark.slow
def test_a_process_has_one_thread_and_no_gpu(pooled):
    assert pooled.parts(VIDEO[:1], ("where",), ["score"]).item() == 1


@pytest.mark.slow
def test_a_sample_without_a_score_is_left_out_alone(pooled, alone):
    found, expected = both(pooled, alone, "a", "b", "c")
    assert torch.equal(found, expected)
    found = pooled.parts(VIDEO, ("a", "hidden", "c"), ["score"])[:, 0]
    assert found.isnan().tolist() == [False, True, False] and torch.equal(found[::2], expected[::2])
    assert pooled.reason.endswith("1 of 3 samples cannot be scored: the face is hidden")


@pytest.mark.slow
def test_a_process_that_is_killed_starts_again(folder, pooled, alone):
    (folder / "alive").touch()
    found, expected = both(pooled, alone, "a", "dies", "c")
    assert torch.equal(found, expected) and pooled.retried == 1


@pytest.mark.slow
def test_a_gradient_is_refused(pooled):
    with pytest.raises(UserError, match=r"^reward\.processes: other processes give no gradient"):
        pooled.scorers["score"](VIDEO.clone().requires_grad_(), ("a", "b", "c"))


@pytest.mark.slow
def test_an_exception_names_the_scorer_and_close_ends_all_in_the_middle_of_a_call(folder, pooled):
    with pytest.raises(ScorerError, match=r"^reward: .*own\.py failed in (.*\n)*KeyError: 'wrong'") as caught:
        pooled.parts(VIDEO, ("a", "wrong", "c"), ["score"])
    assert "scorer score, prompts 'a', 'wrong', 'c'" in caught.value.__notes__[0]
    os.mkfifo(folder / "pid")
    with ThreadPoolExecutor(1) as caller:
        call = caller.submit(pooled.scorers["score"], VIDEO[:1], ("hangs",))
        process = int((folder / "pid").read_text())
        pooled.close()
        with pytest.raises(ChildProcessError, match="was killed by signal 9"):
            call.result()
    assert process not in psutil.pids()
    assert not [child for child in psutil.Process().children() if "scorer_child" in " ".join(child.cmdline())]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"kind": "clip"},
            r"reward\.scorers\.own\.processes is for scorers of files: .*file\.py:NAME, not 'clip'; leave",
        ),
        ({"kind": "sharpness"}, r"reward\.scorers\.own\.processes is for scorers of files"),
        ({"kind": "http"}, r"reward\.scorers\.own\.processes is for scorers of files"),
        ({"kind": "package.module:score"}, r"reward\.scorers\.own\.processes is for scorers of files"),
        ({"kind": "absent.py:score"}, r"reward\.scorers\.own\.kind absent\.py: no such file"),
        ({"kind": f"{__file__}:score", "device": "cuda"}, r"reward\.scorers\.own\.device cuda: .*processes run on CPU"),
    ],
)
def test_scorers_that_no_pool_can_have_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        check_reward(RewardConfig(scorers={"own": ScorerConfig(processes=2, **changes)}), 2)


def test_ocr_has_a_pool_of_the_cores_of_a_rank_by_default(monkeypatch):
    def count(cores: int, ranks: dict[str, str], kind: str = "ocr", processes: int | None = None) -> int:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
        for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"):
            monkeypatch.setenv(name, ranks.get(name, ""))
        return processes_of(ScorerConfig(kind=kind, processes=processes), KINDS[kind])

    assert [count(cores, {}) for cores in (1, 2, 3, 9, 64)] == [1, 1, 2, 8, 8]
    assert count(40, {"LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "16"}) == 4 and count(40, {"WORLD_SIZE": "4"}) == 8
    assert count(64, {}, processes=12) == 12 and count(64, {}, processes=0) == 0 == count(64, {}, "sharpness")
    apart = [scorer_kind(ScorerConfig(kind="ocr", processes=n), "reward", 1.0).apart for n in (None, 1, 0)]
    assert apart == [True, True, False]
