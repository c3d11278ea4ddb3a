"""A run that is killed at any moment, saves included, and resumed ends as the run that was left alone: bit for bit.

And one that goes on with another number of ranks ends so within rounding.

`pytest tests/run/test_kill.py --kills 30` kills every method so often on one and on two ranks; without it, a few times.
A run lives many times; the moment of a kill is drawn by method, ranks and number of the life. A run in which something
fails has the number of its first life in its name, and `--kills 5 --kills-first NUMBER` repeats it alone. With
`--log-file FILE --log-file-level INFO` each kill is a line of the file.
"""

import itertools
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from events import all_end, until
from helpers import (
    ALONE,
    OF_CLIPS,
    OF_SAMPLES,
    REPO,
    assert_near,
    assert_same,
    checkpoint_of,
    environment,
    flags,
    free_port,
    metrics_of,
    small_pipeline,
)

from unified_trainer.parallel.random import generator
from unified_trainer.run.checkpoint import dcp as checkpoint
from unified_trainer.run.checkpoint import manifest
from unified_trainer.run.checkpoint.dcp import CheckpointError
from unified_trainer.run.exit_codes import HACKED
from unified_trainer.run.stop_signal import stop_signal

pytestmark = pytest.mark.kill

STEPS = 4
COMMON = {"student.ema-decay": 0.5, "student.learning-rate": 1e-3, "student.warmup-updates": 4, "device": "cpu"} | {
    "recipe": "tiny",
    "steps": STEPS,
    "checkpoint-every": 1,
    "validate-every": 2,
    "validation.num-samples": 2,
    "validation.num-videos": 0,
}
SMALL = {"video.frames": 5, "video.height": 32, "video.width": 32, "sampler.num-steps": 2, "reward.frames": "first"}
PAIRS = {"algorithm.batch-size": 4, "algorithm.micro-batch": 1}
# The critic moves in every step and the student in every second: the update schedule is part of what is resumed.
MATCHING = SMALL | PAIRS | {"algorithm.student-every": 2, "critic.learning-rate": 1e-3}
METHODS = {
    "finetune": PAIRS | {"data.num-clips": 6, "sampler.num-steps": 1, "sampler.guidance-scale": 1},
    "dance_grpo": SMALL
    | {"algorithm.num-prompts": 2, "algorithm.num-samples": 2, "algorithm.prompts-per-update": 2}
    | {"algorithm.rollout-batch": 2, "algorithm.update-batch": 2, "async-save": True}
    | {"hacking-monitor.action": "stop"},
    "dmd2": MATCHING | {"student.adapter.rank": 2, "critic.adapter.rank": 2},
    "self_forcing": MATCHING,
}
GROUPS = {"algorithm.num-prompts": 2, "algorithm.num-samples": 2, "algorithm.rollout-batch": 2} | {
    "algorithm.prompts-per-update": 2,
    "algorithm.update-batch": 2,
}
# Killed only where --kills asks for many, as their state is of the same kinds; and two of METHODS on two ranks.
OTHERS = {
    "dance_ppo": SMALL | GROUPS | {"value.learning-rate": 1e-3},
    "reward_gradient": SMALL | PAIRS,
    "ode_init": SMALL | PAIRS | {"algorithm.teacher-steps": 3},
    "consistency": PAIRS | {"data.num-clips": 6, "sampler.num-steps": 2},
    # Every term is on, and one of them begins in a later step.
    "distill_rl": SMALL
    | GROUPS
    | {"algorithm.kl-coefficient": 0.1, "algorithm.tilt.beta": 0.5, "critic.learning-rate": 1e-3}
    | {"algorithm.reward-gradient.weight": 0.1, "algorithm.surrogate.first-step": 2},
}
OF_TINY_CLIPS = PAIRS | {"data.num-clips": 6, "sampler.num-steps": 1}
OTHERS |= {name: OF_TINY_CLIPS for name in OF_CLIPS if name not in METHODS | OTHERS}
OTHERS |= {name: SMALL | GROUPS for name in OF_SAMPLES if name not in METHODS | OTHERS}
ON_TWO = ("dance_grpo", "dmd2")  # saves beside training; adapters, and a critic with a clock of its own
LARGER = {
    "dance_grpo": ["--algorithm.rollout-batch", "4", "--algorithm.update-batch", "4"],
    "dmd2": ["--algorithm.micro-batch", "2"],
}
PATIENCE = 600  # seconds that any life may take
LOG = logging.getLogger("kills")


class Lives:
    """Starts runs in forks of a warm process."""

    def __init__(self, folder: Path) -> None:
        words = [sys.executable, str(REPO / "tests" / "support" / "warm.py"), str(folder)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(words, env=environment(), **pipes)

    def _ask(self, **question: object) -> dict:
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start(self, words: list[str], ranks: int, log: Path) -> list[int]:
        return self._ask(start=words, ranks=ranks, port=free_port(), log=str(log))["pids"]

    def end(self, pids: list[int]) -> list[int]:
        return self._ask(wait=pids)["codes"]

    def close(self) -> None:
        self._process.communicate(timeout=PATIENCE)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return small_pipeline(tmp_path_factory.mktemp("base") / "wan")


@pytest.fixture(scope="module")
def lives(base):
    started = Lives(base)
    yield started
    started.close()


@dataclass
class Pace:
    """How long the parts of a run take, in seconds."""

    until_save: float
    save: float
    step: float
    codes: list[int]  # of its ranks, at the end


def ended(pids: list[int]) -> bool:
    """Whether all ranks are done; they wait for their parent to be asked after them."""
    states = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in pids]
    return all(state == "Z" for state in states)


def being_saved(run: Path) -> bool:
    return any((run / "checkpoints").glob(".step_*.tmp"))


def undisturbed(lives: Lives, words: list[str], run: Path, ranks: int) -> Pace:
    start = time.perf_counter()
    pids = lives.start(words, ranks, run.with_suffix(".log"))
    moments = []
    for happened in (lambda: being_saved(run), lambda: manifest.folders(run / "checkpoints"), lambda: ended(pids)):
        assert until(happened, PATIENCE, run.parent, pids), run.with_suffix(".log").read_text()
        moments.append(time.perf_counter() - start)
    codes = lives.end(pids)
    assert codes == [0] * ranks or codes == [HACKED] * ranks, run.with_suffix(".log").read_text()
    first, saved, end = moments
    return Pace(first, saved - first, (end - saved) / (STEPS - 1), codes)


def wait_for_the_moment(pids: list[int], run: Path, pace: Pace, draw: np.random.Generator) -> None:
    """Any time in the first steps of this life; or, as often, while a checkpoint is being written."""
    if draw.random() < 0.5:
        all_end(pids, draw.uniform(0.2 * pace.until_save, pace.until_save + 3 * pace.step))
        return

    def saves(begun: bool, seconds: float = PATIENCE) -> None:
        until(lambda: being_saved(run) is begun or ended(pids), seconds, run.parent, pids)

    for _ in range(draw.integers(0, 3)):  # saves that end
        saves(True)
        saves(False)
    saves(True)
    saves(False, draw.uniform(0, 1.1 * pace.save))


def kill(pids: list[int], draw: np.random.Generator) -> None:
    """All ranks, in any order: at once, or each when the one before has ended."""
    at_once = draw.random() < 0.5
    for pid in draw.permutation(pids).tolist():
        os.kill(pid, signal.SIGKILL)
        assert at_once or all_end([pid], PATIENCE)


def last_saved(run: Path) -> int:
    try:
        return checkpoint.newest_sound(run, ALONE)[1]["step"]
    except CheckpointError as error:
        assert "no step_N folder" in str(error)  # and never a damaged one
        return 0


@dataclass
class Lot:
    """The kills of a method on so many ranks. Each life that is to be killed has a number, which draws its moment."""

    method: str
    ranks: int
    life: int  # number of the next one
    kills: int = 0

    def draw(self) -> np.random.Generator:
        """Begin the next life."""
        self.life += 1
        return generator("kill", self.method, self.ranks, self.life - 1)

    def note(self, run: Path, saved: int) -> None:
        self.kills += 1
        when = "during a save" if being_saved(run) else "elsewhere"
        LOG.info("%s on %d ranks, life %d killed %s; saved: %d", self.method, self.ranks, self.life - 1, when, saved)


def killed_often(lives: Lives, words: list[str], run: Path, lot: Lot, pace: Pace, wanted: int) -> None:
    """Live and die until the run is through or so many kills are done, then let it finish."""
    log, ranks = run.with_suffix(".log"), lot.ranks
    while True:
        saved = last_saved(run)
        log.write_text("")
        pids = lives.start(["--resume", str(run)] if (run / "config.yaml").is_file() else words, ranks, log)
        if lot.kills < wanted:
            draw = lot.draw()
            wait_for_the_moment(pids, run, pace, draw)
        else:
            assert all_end(pids, PATIENCE), log.read_text()
        if ended(pids):
            assert lives.end(pids) == pace.codes, log.read_text()
            return
        lot.note(run, saved)
        kill(pids, draw)
        codes = lives.end(pids)
        assert all(code in (-signal.SIGKILL, *pace.codes) or ranks > 1 for code in codes), (codes, log.read_text())
        if saved and "writing to" in log.read_text():
            assert f"continuing after step {saved}\n" in log.read_text()
        logged = [row["step"] for row in metrics_of(run)] if (run / "metrics.jsonl").is_file() else []
        assert max([0, *logged[:-1]]) <= last_saved(run) + 1  # nothing is lost but the step since the last checkpoint


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("method", METHODS | OTHERS)
def test_killed_and_resumed_is_never_killed(lives, base, tmp_path, method, ranks, request):
    killed_here = ON_TWO if ranks == 2 else METHODS
    if method not in killed_here and not request.config.getoption("--kills"):
        pytest.skip("killed with --kills N only")
    words = flags({"method": method, "student.path": base} | COMMON | (METHODS | OTHERS)[method])
    alone = tmp_path / "alone"
    pace = undisturbed(lives, [*words, "--output", str(alone)], alone, ranks)
    end = metrics_of(alone), checkpoint_of(alone, STEPS)
    lot = Lot(method, ranks, request.config.getoption("--kills-first"))
    wanted = request.config.getoption("--kills") or (2, 1)[ranks - 1]
    while lot.kills < wanted:
        run = tmp_path / f"life-{lot.life}"
        killed_often(lives, [*words, "--output", str(run)], run, lot, pace, wanted)
        assert metrics_of(run) == end[0]  # of training and of validation, each line once
        assert_same(checkpoint_of(run, STEPS), end[1])
        assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [f"step_{STEPS - 1}", f"step_{STEPS}"]
        shutil.rmtree(run)
    LOG.info("%s on %d ranks: %d kills in %d lives, no difference", method, ranks, lot.kills, lot.life)


# Asked to stop.


ENDLESS = {"method": "finetune", "steps": 5000, "validate-every": 1, "checkpoint-every": 0}


def begun(lives: Lives, base: Path, run: Path, ranks: int, **more: object) -> list[int]:
    """A run without an end that has made its first step."""
    settings = COMMON | METHODS["finetune"] | {"student.path": base, "output": run} | ENDLESS | more
    pids = lives.start(flags(settings), ranks, run.with_suffix(".log"))
    assert until(lambda: (run / "metrics.jsonl").is_file() and len(metrics_of(run)) > 1, PATIENCE, run.parent, pids)
    return pids


@pytest.mark.parametrize(("number", "ranks"), [(signal.SIGINT, 1), (signal.SIGTERM, 1), (signal.SIGTERM, 2)])
def test_a_run_that_is_asked_to_stop_saves_and_says_how_to_continue(lives, base, tmp_path, number, ranks):
    """It is enough to ask one rank."""
    run = tmp_path / "run"
    pids = begun(lives, base, run, ranks)
    os.kill(pids[-1], number)
    assert all_end(pids, PATIENCE)
    assert lives.end(pids) == [0] * ranks
    done, said = checkpoint.find(run)[1]["step"], run.with_suffix(".log").read_text()
    assert f"stopped after step {done}; continue with:\n  python -m unified_trainer --resume {run}\n" in said
    assert "Traceback" not in said and not (run / ".lock").exists()
    steps = [row["step"] for row in metrics_of(run) if "validation/reward" in row]
    assert steps == list(range(done + 1))  # the validation of the last step too: a resumed run will not repeat it


def test_a_second_ctrl_c_stops_at_once(lives, base, tmp_path):
    """In the middle of a long step, once the first was heard: nothing is saved."""
    run = tmp_path / "run"
    (pid,) = begun(lives, base, run, 1, **{"algorithm.batch-size": 800, "data.num-clips": 800})
    os.kill(pid, signal.SIGINT)
    log = run.with_suffix(".log")
    assert until(lambda: "finishing this step and saving" in log.read_text(), PATIENCE, tmp_path, [pid])
    os.kill(pid, signal.SIGINT)
    assert lives.end([pid]) == [130], log.read_text()
    assert not (run / "checkpoints").exists()


def test_a_second_ctrl_c_reaches_a_process_in_the_background():
    """Shells start those with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(KeyboardInterrupt), stop_signal() as asked:
            signal.raise_signal(signal.SIGINT)
            assert asked == [signal.SIGINT]
            signal.raise_signal(signal.SIGINT)
        assert asked == [signal.SIGINT] and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


# Another number of ranks.


def through(lives: Lives, words: list[str], run: Path, ranks: int) -> str:
    log = run.with_suffix(".log")
    pids = lives.start(words, ranks, log)
    assert all_end(pids, PATIENCE), log.read_text()
    assert lives.end(pids) == [0] * ranks, log.read_text()
    return log.read_text()


@pytest.mark.parametrize("method", ON_TWO)
def test_two_ranks_then_one_then_two(lives, base, tmp_path, method):
    """Shards, one rank with larger micro-batches, then shared tokens: the end is that of one rank, within rounding.

    All state goes along, averages and adapters too. A large eps makes AdamW's steps proportional to the gradient, so
    that rounding stays small.
    """
    roles = ("student", "critic") if "critic.learning-rate" in METHODS[method] else ("student",)
    linear = {f"{role}.{key}": value for role in roles for key, value in {"eps": 1, "learning-rate": 1}.items()}
    words = flags({"method": method, "student.path": base} | COMMON | METHODS[method] | linear)
    larger = LARGER[method]
    moved, alone = tmp_path / "moved", tmp_path / "alone"
    words += ["--steps", "6"]
    through(lives, [*words, "--steps", "2", "--output", str(moved)], moved, 2)
    assert len(list((moved / "checkpoints" / "step_2" / "student" / "ema").iterdir())) == 2
    said = through(lives, ["--resume", str(moved), "--steps", "4", *larger], moved, 1)
    assert "continuing after step 2\n" in said and f"changed {larger[0][2:].replace('-', '_')}: " in said
    assert len(list((moved / "checkpoints" / "step_4" / "student" / "ema").iterdir())) == 1
    said = through(lives, ["--resume", str(moved), "--steps", "6", "--parallel.sequence", "2"], moved, 2)
    assert "ranks: 2 on cpu = replicate 1 x shard 1 x sequence 2\n" in said
    through(lives, [*words, "--output", str(alone)], alone, 1)
    one, other = checkpoint_of(moved, 6), checkpoint_of(alone, 6)
    for role, kind in itertools.product(roles, ("weights", "optimizer", "updates")):
        keys = [key for key in one if key.startswith(f"{role}/{kind}")]
        assert_near({key: one[key] for key in keys}, {key: other[key] for key in keys}, 1e-3)
    averages = [key for key in one if key.startswith("student/ema/")]
    assert_near({key: one[key] for key in averages}, {key: other[key] for key in averages}, 1e-3)
    moved_most = max(float((one[key] - one[key.replace("/ema/", "/weights/")]).abs().max()) for key in averages)
    assert moved_most > 1e-3  # the average is not the weights: it came along by itself


def test_a_full_disk_on_two_ranks(lives, base, tmp_path):
    """Both ranks go on after each save that found no space, and both end with the same error."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1200k", "none", str(disk)], capture_output=True).returncode:
        pytest.skip("no right to mount a tmpfs; test_manager.py fills a disk without one")
    try:
        words = flags({"method": "dance_grpo", "student.path": base} | COMMON | METHODS["dance_grpo"])
        log = tmp_path / "log"
        pids = lives.start([*words, "--steps", "2", "--output", str(disk / "run")], 2, log)
        assert all_end(pids, PATIENCE), log.read_text()
        assert lives.end(pids) == [2, 2]
        said = log.read_text()
        assert said.count("warning: step 1 is not saved: no space for a checkpoint") == 1
        assert said.count("step 2 could not be saved: free space in") == 2
        assert [row["step"] for row in metrics_of(disk / "run")] == [0, 1, 2, 2]
    finally:
        subprocess.run(["umount", str(disk)], check=True)
