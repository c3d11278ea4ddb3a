"""A scorer with a Python of its own: the numbers are those of this process, failures are named, nothing stays behind.

The executable is this interpreter; what runs in it knows nothing of the tests or of this package.
"""

import gc
import importlib._bootstrap_external
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from helpers import CPU, REPO, run

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.input_files import read_yaml
from unified_trainer.basics.trust import asking
from unified_trainer.rewards.base import RewardConfig, ScorerConfig
from unified_trainer.rewards.reward import Reward
from unified_trainer.rewards.scorer_process import ScorerError, ScorerProcess
from unified_trainer.rewards.scorers import check_reward, load_scorers
from unified_trainer.run.settings.command_line import parse
from unified_trainer.run.settings.config import check_resumable, save, with_checksum

pytestmark = pytest.mark.slow

# A user's file.
FILE = """
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import torch

FOLDER = Path(__file__).parent
COUNT = FOLDER / "count"
print("loading")


def red(videos, prompts):
    print("scoring", videos.shape)
    sign = videos.new_tensor([1.0 if "red" in prompt else -1.0 for prompt in prompts])
    return sign * videos[:, 0].flatten(1).mean(1)


def numbers(videos, prompts):
    return [float("nan"), *range(1, len(videos))]


def short(videos, prompts):
    return videos.flatten(1).mean(1)[:-1]


def wrong(videos, prompts):
    return {}[prompts[0]]


def out_of_memory(videos, prompts):
    raise RuntimeError("out of memory")


def hang(videos, prompts):
    os.kill(os.getppid(), signal.SIGALRM)
    signal.pause()


def dies_twice(videos, prompts):
    started = int(COUNT.read_text()) + 1 if COUNT.is_file() else 1
    COUNT.write_text(str(started))
    if started < 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return red(videos, prompts)


class Weighted:
    def __init__(self, settings):
        (FOLDER / "settings.json").write_text(json.dumps(settings))
        self.weight = float(Path(settings["path"]).read_text())

    def __call__(self, videos, prompts):
        assert videos.device == torch.device("cpu") and not torch.is_grad_enabled()
        return self.weight * videos.flatten(1).mean(1).numpy()


def surroundings(videos, prompts):
    kept = ("PYTHONPATH", "RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "WANDB_API_KEY", "SCORER_CACHE")
    modules = [name for name in sys.modules if name.startswith("unified_trainer.")]
    told = {"path": sys.path, "modules": modules, "environment": {name: os.environ.get(name) for name in kept}}
    (FOLDER / "told.json").write_text(json.dumps(told))
    return [0.0] * len(videos)


def family(videos, prompts):
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    (FOLDER / "pids").write_text(f"{os.getpid()} {child.pid}")
    signal.pause()


NUMBER = 1
"""
VIDEO = torch.rand(3, 3, 2, 4, 4, generator=torch.Generator().manual_seed(0))
PROMPTS = ("a red circle", "a blue square", "a red square")
RED = VIDEO[:, 0].flatten(1).mean(1) * torch.tensor([1.0, -1.0, 1.0])


@pytest.fixture
def file(tmp_path):
    (tmp_path / "own.py").write_text(FILE)
    return tmp_path / "own.py"


def config_of(file: Path, name: str, **changes) -> ScorerConfig:
    return ScorerConfig(**{"kind": f"{file}:{name}", "python": sys.executable} | changes)


def started(file: Path, name: str, timeout: float = 60.0, **changes) -> ScorerProcess:
    return ScorerProcess(config_of(file, name, **changes), CPU, "reward.scorers.own", timeout)


def reward(file: Path, name: str, codec, **changes) -> Reward:
    config = RewardConfig(scorers={"own": config_of(file, name)}, **changes)
    check_reward(config, 2)
    return Reward(load_scorers(config, CPU)[0], codec, config)


def children() -> list[psutil.Process]:
    """The processes of scorers, of those too that only a cycle still holds."""
    if _children():
        gc.collect()
    return _children()


def _children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if "scorer_child" in " ".join(child.cmdline())]


@pytest.fixture(autouse=True)
def nothing_stays():
    yield
    assert not children()


# What it answers.


@pytest.mark.slow
def test_its_scores_are_bit_for_bit_those_of_this_process(file, capfd):
    """What the scorer prints goes to the standard error, and does not disturb the answers."""
    scorer = started(file, "red")
    for _ in range(2):
        assert torch.equal(scorer(VIDEO, PROMPTS), RED)
    assert torch.equal(scorer(VIDEO.movedim(1, -1).contiguous().movedim(-1, 1), PROMPTS), RED)
    assert torch.equal(scorer(VIDEO.double().requires_grad_(), list(PROMPTS)), RED)
    printed = capfd.readouterr()
    assert not printed.out and "scoring torch.Size([3, 3, 2, 4, 4])" in printed.err


@pytest.mark.slow
def test_a_class_gets_the_settings(file, tmp_path):
    (tmp_path / "weight").write_text("2.5")
    scorer = started(
        file, "Weighted", path=str(tmp_path / "weight"), batch=7, precision="bf16", settings={"bonus": "3"}
    )
    torch.testing.assert_close(scorer(VIDEO, PROMPTS), 2.5 * VIDEO.flatten(1).mean(1))
    told = json.loads((tmp_path / "settings.json").read_text())
    given = {"path": str(tmp_path / "weight"), "precision": "bf16", "batch": 7, "device": "cpu"}
    assert told == {**given, "settings": {"bonus": 3}}


@pytest.mark.slow
def test_a_score_that_is_not_finite_is_not_repaired(file, codec):
    with pytest.raises(UserError, match=r"reward: own: the score of sample 0 \('a red circle'\) is not finite"):
        reward(file, "numbers", codec).parts(VIDEO, PROMPTS, ["own"])


@pytest.mark.slow
def test_it_sees_nothing_of_the_trainer(file, tmp_path, monkeypatch):
    """Neither its modules and module path, nor that it is a rank of a launcher, nor its keys."""
    for name in ("RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "WANDB_API_KEY", "SCORER_CACHE"):
        monkeypatch.setenv(name, "3")
    monkeypatch.setenv("PYTHONPATH", str(REPO / "tests" / "support"))
    started(file, "surroundings", python_variables=("SCORER_CACHE",))(VIDEO, PROMPTS)
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["modules"] == [] and told["path"][-1] == str(tmp_path)
    assert not {str(REPO / "tests" / "support"), str(REPO / "unified_trainer" / "rewards")} & {*told["path"]}
    assert {name for name, value in told["environment"].items() if value} == {"SCORER_CACHE"}


@pytest.mark.slow
def test_a_run_trains_on_it(file, run_folder):
    own = ["--reward.scorers.own.kind", f"{file}:red", "--reward.scorers.own.python", sys.executable]
    run("dance_grpo", run_folder, *own, "--reward.scorers.here.kind", f"{file}:red")
    row = json.loads((run_folder / "metrics.jsonl").read_text().splitlines()[0])
    assert row["train/reward/own"] == row["train/reward/here"] != 0


# Failures.


@pytest.mark.slow
def test_an_exception_arrives_with_its_traceback(file):
    scorer = started(file, "wrong")
    with pytest.raises(ScorerError) as caught:
        scorer(VIDEO, PROMPTS)
    text = str(caught.value)
    assert text.startswith(f"reward.scorers.own: {file} failed in {sys.executable}:\nTraceback")
    assert "return {}[prompts[0]]" in text and "KeyError: 'a red circle'" in text


@pytest.mark.slow
def test_an_exception_is_not_retried_and_a_fault_is(file, codec):
    """As in this process: another call may succeed after an OSError or RuntimeError."""
    one = reward(file, "wrong", codec, retries=2)
    with pytest.raises(ScorerError) as caught:
        one.parts(VIDEO, PROMPTS, ["own"])
    assert one.retried == 0 and "while working on scorer own" in caught.value.__notes__[0]
    one = reward(file, "out_of_memory", codec, retries=1)
    with pytest.raises(ChildProcessError, match="RuntimeError: out of memory") as caught:
        one.parts(VIDEO, PROMPTS, ["own"])
    assert one.retried == 1 and caught.value.__notes__[0].startswith("reward: scorer own failed 2 times")


@pytest.mark.slow
def test_a_missing_score_is_an_error(file):
    with pytest.raises(UserError, match=r"kind: it gave scores of shape \[2\] for 3 videos, expected one number for"):
        started(file, "short")(VIDEO, PROMPTS)


@pytest.mark.slow
def test_a_process_that_dies_is_named_and_the_next_call_starts_another(file):
    scorer = started(file, "dies_twice")
    for _ in range(2):
        with pytest.raises(
            ChildProcessError, match=r"scorers\.own: the process of .* was killed by signal 9, often for"
        ):
            scorer(VIDEO, PROMPTS)
        assert not children()
    assert torch.equal(scorer(VIDEO, PROMPTS), RED)


@pytest.mark.slow
def test_retries_start_it_again(file, codec):
    one = reward(file, "dies_twice", codec, retries=2)
    first_frames = VIDEO[:, 0, :1].flatten(1).mean(1) * torch.tensor([1.0, -1.0, 1.0])
    assert torch.equal(one.parts(VIDEO, PROMPTS, ["own"])[:, 0], first_frames) and one.retried == 2


def test_a_process_that_hangs_is_named_and_ended(file):
    """It hangs without end, and so for any timeout."""
    file.write_text("import signal\n\nsignal.pause()\n")
    with pytest.raises(
        TimeoutError, match=r"own: the process of .* gave no answer in 0\.5 s and was ended: raise reward\.t"
    ):
        started(file, "red", timeout=0.5)
    assert not children()


def test_a_process_that_ends_says_how(file):
    file.write_text("import os\n\nos._exit(7)\n")
    with pytest.raises(
        ChildProcessError, match=r"ended with exit code 7: see what it printed; reward\.retries starts it"
    ):
        started(file, "red")


@pytest.mark.slow
def test_a_call_that_is_interrupted_ends_the_process(file):
    """Its answer would be taken for that of the next call."""
    scorer = started(file, "hang")

    def interrupt(signal_number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            scorer(VIDEO, PROMPTS)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not children()


PARENT = """
import sys
import torch
from unified_trainer.rewards.base import ScorerConfig
from unified_trainer.rewards.scorer_process import ScorerProcess

config = ScorerConfig(kind=sys.argv[1], python=sys.executable)
ScorerProcess(config, torch.device("cpu"), "reward", 600.0)(torch.zeros(1, 3, 1, 2, 2), ["a"])
"""


@pytest.mark.kill
def test_it_ends_with_a_killed_parent_in_the_middle_of_a_call(file, tmp_path):
    """The processes that the scorer has started end too, and Ctrl-C in the terminal of the parent reaches none."""
    os.mkfifo(tmp_path / "pids")
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, f"{file}:family"], env={**os.environ, "PYTHONPATH": str(REPO)}
    )
    processes = [psutil.Process(int(pid)) for pid in (tmp_path / "pids").read_text().split()]
    assert {os.getpgid(one.pid) for one in processes} == {processes[0].pid}
    parent.kill()
    parent.wait()
    alive = psutil.wait_procs(processes, timeout=30)[1]
    for one in alive:
        one.kill()
    assert not alive


# Settings.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"kind": "hpsv3"},
            r"reward\.scorers\.own\.kind must be path/to/file\.py:NAME, not 'hpsv3'; leave reward\.sco",
        ),
        ({"kind": "package.module:red"}, r"reward\.scorers\.own\.kind must be path/to/file\.py:NAME"),
        ({"kind": "absent.py:red"}, r"reward\.scorers\.own\.kind absent\.py: no such file"),
        ({"python": "no/such/python"}, r"reward\.scorers\.own\.python 'no/such/python' is no executable file"),
        ({"python": "/"}, r"reward\.scorers\.own\.python '/' is no executable file"),
        ({"device": "abacus"}, r"reward\.scorers\.own\.device 'abacus' is no device"),
    ],
)
def test_wrong_settings_are_refused_before_it_starts(file, changes, message):
    with pytest.raises(UserError, match=message):
        check_reward(RewardConfig(scorers={"own": config_of(file, "red", **changes)}), 2)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("absent", {}, r"^reward\.scorers\.own\.kind: .*own\.py defines no absent$"),
        ("NUMBER", {}, r"^reward\.scorers\.own\.kind: NUMBER is a int; expected a function, or a class with __call__$"),
        (
            "red",
            {"path": "weights"},
            r"^reward\.scorers\.own\.path: only a class takes settings, but red is a function$",
        ),
    ],
)
def test_what_only_the_file_tells_is_refused_when_it_is_loaded(file, name, changes, message):
    with pytest.raises(UserError, match=message):
        started(file, name, **changes)


def test_a_file_that_cannot_be_loaded_keeps_its_traceback(file):
    file.write_text("1 / 0\n")
    with pytest.raises(ScorerError, match="ZeroDivisionError: division by zero"):
        started(file, "red")


def test_a_package_that_its_python_lacks_is_named(file):
    file.write_text("import absent_of_all\n")
    message = (
        r"^reward\.scorers\.own\.python: .* needs the package absent_of_all, which .* does not have: install it there$"
    )
    with pytest.raises(UserError, match=message):
        started(file, "red")


@pytest.mark.slow
def test_a_file_may_have_the_name_of_a_package_that_it_imports(file):
    file = file.rename(file.with_name("psutil.py"))
    file.write_text(
        "import psutil\n\n\ndef score(videos, prompts):\n    return [float(len(psutil.pids()) > 0)] * len(videos)\n"
    )
    assert started(file, "score")(VIDEO, PROMPTS).tolist() == [1.0, 1.0, 1.0]


def test_a_run_of_an_earlier_version_resumes_with_its_scorers(tmp_path):
    """Its file does not hold the settings of a scorer that came later; another scorer is still a change."""
    words = ["--method", "dance_grpo", "--reward.scorers.sharpness.weight", "0.5"]
    save(parse(words), tmp_path / "config.yaml")
    text = (tmp_path / "config.yaml").read_text()
    assert read_yaml(tmp_path / "config.yaml")["reward"]["scorers"]["sharpness"].keys() >= {"python"}
    earlier = "".join(line for line in text.splitlines(True) if "python:" not in line and "sha256" not in line)
    (tmp_path / "config.yaml").write_text(with_checksum(earlier))
    assert check_resumable(parse([*words, "--reward.timeout", "60"]), tmp_path / "config.yaml") == [
        "reward.timeout: 600.0 -> 60.0"
    ]
    with pytest.raises(UserError, match=r"cannot change .*reward\.scorers\.saturation\.weight: None -> 1\.0"):
        check_resumable(parse([*words, "--reward.scorers.saturation.weight", "1"]), tmp_path / "config.yaml")


BESIDE = """
import importlib

import beside_it

def known(videos, prompts):
    return [beside_it.NUMBER] * len(videos)

def unknown(videos, prompts):
    return [importlib.import_module("not_named").NUMBER] * len(videos)
"""


def test_what_runs_is_what_was_read_here(tmp_path):
    """Never a compiled file beside the scorer or beside what it imports, and nothing that was not looked at."""
    (tmp_path / "own.py").write_text(BESIDE)
    for name in ("beside_it", "not_named"):
        (tmp_path / f"{name}.py").write_text("NUMBER = 3.0")
    (tmp_path / "__pycache__").mkdir()
    for name in ("own", "beside_it"):
        source = (tmp_path / f"{name}.py").read_bytes()
        code = compile(source.replace(b"3.0", b"4.0") + b"\nraise SystemExit", name, "exec")
        compiled = importlib._bootstrap_external._code_to_hash_pyc(code, importlib.util.source_hash(source), False)
        (tmp_path / "__pycache__" / f"{name}.{sys.implementation.cache_tag}.pyc").write_bytes(compiled)
    assert started(tmp_path / "own.py", "known")(VIDEO, PROMPTS).tolist() == [3.0] * 3
    with pytest.raises(UserError, match=r"imports \S+not_named.py, which no import statement names"):
        started(tmp_path / "own.py", "unknown")(VIDEO, PROMPTS)


def test_a_file_that_changed_since_the_answer_is_not_sent(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "own.py").write_text(FILE)
    with asking(["--trust"]):
        started(tmp_path / "own.py", "red")
    (tmp_path / "own.py").write_text(FILE + "open('EXECUTED', 'w')")
    with asking([]), pytest.raises(UserError, match="you have not agreed"):
        started(tmp_path / "own.py", "red")
