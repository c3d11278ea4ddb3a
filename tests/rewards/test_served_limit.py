"""A scorer that hangs in serve-reward: all who wait hear of it, and the server ends."""

import os
import signal
import threading

import pytest
import torch
from helpers import free_port

from unified_trainer.basics.errors import UserError
from unified_trainer.rewards.time_limit import watched
from unified_trainer.rewards.video_json import PROTOCOL, to_json
from unified_trainer.rewards.wire import exchange
from unified_trainer.tools.serve.serve_reward import serve_reward

SCORER = """
from pathlib import Path

def hangs(videos, prompts):
    if "hang" in prompts:
        (Path(__file__).parent / "go").read_bytes()
    return videos.flatten(1).mean(1)
"""
LATE = r"set: reward\.scorers\.own gave no answer in 1 s: raise reward\.timeout, or look for why it hangs; the call "
VIDEO = torch.rand(1, 3, 1, 4, 4)


@pytest.fixture
def handlers():
    """The signal handlers that the server replaces, put back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.slow
def test_all_who_wait_hear_of_a_scorer_that_hangs_and_the_server_ends(tmp_path, handlers):
    """Two requests are in the batch that hangs, and one behind it; a call in time before them is answered."""
    (tmp_path / "own.py").write_text(SCORER)
    settings = f"reward: {{timeout: 1.0, scorers: {{own: {{kind: '{tmp_path / 'own.py'}:hangs', frames: all}}}}}}\n"
    (tmp_path / "set.yaml").write_text(settings)
    os.mkfifo(tmp_path / "go")
    held = os.open(tmp_path / "go", os.O_RDWR)  # a read ends when it is closed
    port, answers = free_port(), []

    def request_scores(prompt: str) -> object:
        body = {"protocol": PROTOCOL, "videos": to_json(VIDEO, "float32"), "prompts": [prompt]}
        return exchange(f"http://127.0.0.1:{port}", "score", body, timeout=30)

    def client(prompt: str) -> None:
        try:
            answers.append(request_scores(prompt))
        except ConnectionError as error:
            answers.append(error)

    def clients() -> None:
        while not answers or isinstance(answers[-1], ConnectionError):  # until the server answers
            answers.clear()
            client("in time")
        threads = [threading.Thread(target=client, args=(prompt,)) for prompt in ("hang", "hang", "hang")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    asking = threading.Thread(target=clients, daemon=True)
    asking.start()
    try:
        with pytest.raises(UserError, match=f"^{LATE}cannot be ended, so the server ends$"):
            serve_reward(str(tmp_path / "set.yaml"), port=port, batch=2, wait=0.1, device="cpu")
        asking.join(30)
    finally:
        os.close(held)
        for thread in threading.enumerate():
            if thread.name == "batcher":  # the call, which ends now
                thread.join(30)
    in_time, *late = answers
    assert in_time["scores"] == pytest.approx(VIDEO.flatten(1).mean(1).tolist())
    assert len(late) == 3
    for error in late:
        assert "answered with code 503: set: reward.scorers.own gave no answer in 1 s" in str(error)


def test_a_call_in_time_leaves_no_timer_and_a_late_one_is_told_while_it_lasts():
    said, heard = [], threading.Event()

    def late(error: TimeoutError) -> None:
        said.append(str(error))
        heard.set()

    def waits(video, prompts):
        return torch.full((len(video),), float(heard.wait(30)))

    watched(lambda video, prompts: video.flatten(1).mean(1), 60.0, "reward", late)(VIDEO, ("a",))
    for timer in [one for one in threading.enumerate() if isinstance(one, threading.Timer)]:
        timer.join(30)
        assert not timer.is_alive()
    assert said == []
    assert watched(waits, 0.02, "reward", late)(VIDEO, ("a",)).tolist() == [1.0]
    assert said == ["reward gave no answer in 0.02 s: raise reward.timeout, or look for why it hangs"]
