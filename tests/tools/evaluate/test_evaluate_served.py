"""The command evaluate with a student behind HTTP: the numbers of its checkpoint, and what is refused."""

import json
import urllib.request
from contextlib import contextmanager

import pytest
from answering import answering
from evaluating import refused, table
from helpers import SMALL, flags

from unified_trainer.__main__ import main
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.rewards.video_json import to_json
from unified_trainer.run.checkpoint.manifest import weights_digest
from unified_trainer.tools.evaluate import checkpoints as parsing
from unified_trainer.tools.load_run import load_role
from unified_trainer.tools.serve import serve as module
from unified_trainer.tools.serve.remote_student import RemoteStudent
from unified_trainer.tools.serve.serve import student_service
from unified_trainer.tools.serve.web_server import open_port, serving

pytestmark = pytest.mark.slow

PROMPTS = ("a red circle moving left", "a blue square moving up", "a green triangle moving right")
ASKED = ("--prompts", *PROMPTS, "--samples", "2", "--batch", "2", "--resamples", "20", "--num-videos", "1")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose EMA weights differ from its trained ones."""
    folder = tmp_path_factory.mktemp("trained") / "mine"
    moved = flags({"student.ema-decay": 0.5, "student.learning-rate": 1e-2})
    assert main([*SMALL["finetune"], *moved, "--output", str(folder)]) == 0
    return folder


@contextmanager
def served(run, batch: int = 2):
    """Serve the EMA weights of a run in this process, and give the address."""
    loaded = load_role(f"{run}:ema", "student", None, Mesh.alone("cpu"), causal=True)
    codec = loaded.family.codec(loaded.base, loaded.role.device, loaded.run.encoders)
    digest = weights_digest(loaded.metadata, "student", ema=True)
    service = student_service("mine@1:ema", loaded, codec, batch, 0.0, digest)
    with open_port("127.0.0.1", 0) as listener, serving(service, listener) as url:
        yield url


@pytest.fixture(scope="module")
def url(run):
    with served(run) as address:
        yield address


@pytest.fixture(scope="module")
def about(url):
    with urllib.request.urlopen(f"{url}/health") as answer:
        return json.load(answer)


def test_a_served_student_measures_what_its_checkpoint_does(run, url, tmp_path, monkeypatch):
    """Bit for bit, with batches of the same size; finished samples are used again, by the digest of the weights."""
    sizes, now, most = [], [], []
    draw_latents, sample = module.draw_latents, RemoteStudent.sample
    monkeypatch.setattr(module, "draw_latents", lambda *args: sizes.append(len(args[2])) or draw_latents(*args))

    def counted(*args, **options):
        now.append(1)
        most.append(len(now))
        try:
            return sample(*args, **options)
        finally:
            now.pop()

    monkeypatch.setattr(RemoteStudent, "sample", counted)
    output = tmp_path / "out"
    words = ["evaluate", f"{run}:ema", f"{url},in_flight=2", *ASKED, "--output", str(output)]
    assert main(words) == 0
    assert sizes == 3 * [2] and max(most) == 2
    differences = {row["measure"]: float(row["difference"]) for row in table(output, "differences.csv")}
    assert differences.keys() >= {"reward", "accuracy", "pixels/diversity", "frechet", "network_calls"}
    assert {value for name, value in differences.items() if name != "samples_per_second"} == {0}
    rows = table(output, "samples.csv")
    for row in rows:
        del row["checkpoint"], row["video"]
    assert rows[:6] == rows[6:]
    shown = json.loads((output / "evaluation.json").read_text())["checkpoints"]
    assert shown[0]["weights"] == shown[1]["weights"] and shown[0]["sampler"] == shown[1]["sampler"]
    assert [one["spec"] for one in shown] == [f"{run}@1:ema", url]
    features = [(output / one["samples"] / "features.safetensors").read_bytes() for one in shown]
    assert features[0] == features[1]
    assert main(words) == 0 and len(sizes) == 3


def test_a_server_that_dies_is_named_and_finished_checkpoints_stay(run, url, about, tmp_path, capsys):
    """After two of six videos; the command then goes on with another server, here one that is asked for 8 bits."""
    first = RemoteStudent(url).sample(PROMPTS[:1] * 2)
    asked = (f"{run}:weights", *ASKED, "--output", tmp_path / "out")
    with answering((200, about), (200, {"videos": to_json(first, "float32")}), (200, None)) as (dying, _):
        said = refused(capsys, asked[0], f"{dying},in_flight=1", *asked[1:])
    assert f"{dying}/sample gave no answer" in said and "2 of 6 videos of mine@1:ema had come" in said
    finished = [file.parent.name for file in (tmp_path / "out").glob("samples/*/measured.json")]
    assert len(finished) == 1 and finished[0].startswith("mine@1-")
    before = next((tmp_path / "out").glob("samples/*/measured.json")).stat().st_mtime_ns
    assert main(["evaluate", *map(str, (asked[0], f"{url},encoding=uint8", *asked[1:]))]) == 0
    assert (tmp_path / "out" / "samples" / finished[0] / "measured.json").stat().st_mtime_ns == before
    shown = json.loads((tmp_path / "out" / "evaluation.json").read_text())["checkpoints"]
    assert [one["name"] for one in shown] == ["mine@1", "mine@1:ema,encoding=uint8"]


def test_a_server_whose_weights_change_is_noticed(run, about, tmp_path, capsys, url):
    video = {"videos": to_json(RemoteStudent(url).sample(PROMPTS[:2]), "float32")}
    asked = ("--prompts", *PROMPTS[:2], "--batch", "2", "--recipe", "tiny", "--output", tmp_path / "out")
    with answering((200, about), (200, video), (200, about | {"weights": "other"})) as (changing, _):
        said = refused(capsys, changing, *asked)
    assert f"{changing} is another student than when the evaluation began: mine@1:ema with weights other" in said
    assert not list((tmp_path / "out").glob("samples/*/measured.json"))
    with answering((200, about | {"frames": 5}), (200, video)) as (lying, _):
        said = refused(capsys, lying, *asked)
    assert f"{lying} gave videos of [17, 64, 64], but says that it makes [5, 64, 64]" in said


@pytest.mark.parametrize(
    ("change", "words", "said"),
    [
        ({"protocol": 2}, ("URL", "RUN"), "URL speaks protocol 2, and this program 1"),
        ({"weights": None, "fps": None}, ("URL", "RUN"), "URL/health: weights is missing"),
        ({"frames": 5, "latents": [16, 2, 8, 8]}, ("RUN", "URL"), "mine@1:ema makes videos of 5 x 64 x 64"),
        ({"latents": [48, 5, 4, 4]}, ("RUN", "URL"), "latents (48, 5, 4, 4), mine@1 of 17 x 64 x 64"),
        ({"fps": 16.0}, ("RUN", "URL"), "mine@1:ema makes videos of 16 frames per second and mine@1 of 8: serve"),
        ({"latents": 3}, ("RUN", "URL"), "URL/health: latents must be a valid list, not 3"),
        ({"sampler": {"speed": 3}}, ("RUN", "URL"), "URL/health: sampler.speed is not known"),
        ({"frames": -1}, ("RUN", "URL"), "URL/health: video.frames must be"),
        ({}, ("URL",), "URL is a served student: name a run too, a --recipe, or --reward FILE"),
        ({}, ("URL", "RUN", "--sampler.num-steps", "3"), "--sampler.num-steps: the student at URL samples with the"),
        ({}, ("URL,speed=3", "RUN"), "URL,speed=3: speed is not known"),
        ({}, ("URL,encoding=mp4", "RUN"), "URL,encoding=mp4: encoding must be one of float32, uint8"),
        ({}, ("URL,in_flight=0", "RUN"), "URL,in_flight=0: in_flight must be from 1 to 1000, not 0"),
        ({}, ("URL,token_variable=ABSENT", "RUN"), "the environment has no ABSENT"),
        ({}, ("URL,timeout=0", "RUN"), "timeout must be above 0"),
        ({}, ("URL", "URL", "RUN"), "URL is URL once more: name each checkpoint once"),
        (None, ("URL", "RUN"), "URL/health gave no answer"),
    ],
)
def test_what_cannot_be_is_refused_before_a_weight_is_read(
    run, about, tmp_path, monkeypatch, capsys, change, words, said
):
    for name in ("load_role", "load_folder"):
        monkeypatch.setattr(parsing, name, lambda *args, **options: pytest.fail("weights were read"))
    told = None if change is None else {k: v for k, v in (about | change).items() if v is not None}
    with answering((200, told)) as (address, _):
        given = [word.replace("URL", address).replace("RUN", str(run)) for word in words]
        found = refused(capsys, *given, "--prompts", "a", "--output", tmp_path / "out")
    assert said in found.replace(address, "URL").replace(str(run), "RUN")
    assert not (tmp_path / "out").exists()
