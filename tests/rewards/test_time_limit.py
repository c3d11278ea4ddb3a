"""A scorer of this process that hangs: TimeoutError, the retry rule, and at last the end of the process."""

import faulthandler
import signal
import sys
import threading

import pytest
import torch
from helpers import CPU, shell

from unified_trainer.basics.errors import UserError
from unified_trainer.rewards.base import RewardConfig, ScorerConfig
from unified_trainer.rewards.reward import VideoReward
from unified_trainer.rewards.scorers import KINDS, load_scorers, scorer_kind
from unified_trainer.rewards.time_limit import time_limit

VIDEO, PROMPTS = torch.rand(2, 3, 1, 4, 4), ("a", "b")
SCORER = """
import signal

calls = []

def hangs_once(videos, prompts):
    calls.append(1)
    if len(calls) == 1:
        hangs(videos, prompts)
    return videos.flatten(1).mean(1)

def hangs(videos, prompts):
    signal.raise_signal(signal.SIGALRM)  # as the timer does
    signal.pause()
"""


@pytest.fixture
def reward(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(SCORER)

    def of(name: str, **changes) -> VideoReward:
        config = RewardConfig(scorers={"own": ScorerConfig(kind=f"{file}:{name}")}, **changes)
        return VideoReward(load_scorers(config, CPU)[0], config)

    return of


def test_a_call_that_hangs_is_retried(reward):
    one = reward("hangs_once", retries=1)
    assert torch.allclose(one.parts(VIDEO, PROMPTS, ["own"])[:, 0], VIDEO.flatten(1).mean(1))
    assert one.retried == 1


def test_then_it_is_an_error_that_names_the_scorer(reward):
    one = reward("hangs", timeout=60.0, retries=2)
    wanted = r"reward\.scorers\.own gave no answer in 60 s: raise reward\.timeout.*; asked 3 times \(reward\.retries\)"
    with pytest.raises(UserError, match=wanted):
        one.parts(VIDEO, PROMPTS, ["own"])
    assert one.retried == 2


def test_a_call_in_time_leaves_nothing_behind():
    def handler(number, frame):
        raise AssertionError

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with time_limit(60.0, "reward"):
            assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 60
        assert signal.getitimer(signal.ITIMER_REAL)[0] == 0 and signal.getsignal(signal.SIGALRM) is handler
        with pytest.raises(KeyError), time_limit(60.0, "reward"):
            raise KeyError
        assert signal.getitimer(signal.ITIMER_REAL)[0] == 0 and signal.getsignal(signal.SIGALRM) is handler
    finally:
        signal.signal(signal.SIGALRM, before)
    faulthandler.cancel_dump_traceback_later()


def test_another_thread_has_no_limit():
    timers = []

    def work():
        with time_limit(60.0, "reward"):
            timers.append(signal.getitimer(signal.ITIMER_REAL)[0])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert timers == [0.0]


def test_scorers_with_a_timeout_of_their_own_have_no_second_one():
    assert {name for name, kind in KINDS.items() if kind.own_timeout} == {"http", "vlm", "vlm_pairs"}
    assert scorer_kind(ScorerConfig(kind="own.py:f", python=sys.executable), "reward", 1.0).own_timeout


@pytest.mark.slow
def test_a_call_that_cannot_be_ended_ends_the_process():
    """It blocks the signal, as a library that never returns to Python does."""
    program = """
import signal, threading
from unified_trainer.rewards import time_limit

def stuck_scorer():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    threading.Event().wait()

time_limit.GRACE = 0.2
with time_limit.time_limit(0.1, "reward"):
    stuck_scorer()
"""
    done = shell(sys.executable, "-c", program)
    assert done.returncode == 1 and "Timeout" in done.stderr and "in stuck_scorer" in done.stderr
