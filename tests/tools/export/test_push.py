"""The command push, against a small hub on this machine, and the model card that it uploads."""

import base64
import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
import yaml
from helpers import ALONE, copy_of, files_of, flags, refused, run
from huggingface_hub import constants

from unified_trainer.__main__ import main
from unified_trainer.basics.requests import Request
from unified_trainer.tools.export import model_card
from unified_trainer.tools.export.model_card import PROMPT
from unified_trainer.tools.load_run import load_role
from unified_trainer.tools.sample.sample import videos

pytestmark = pytest.mark.slow

NAME, COMMIT = "team/student", "0" * 40
SAVED = 'import sys, numpy; assert "unified_trainer" not in sys.modules; numpy.save("frames.npy", frames)'


class Hub(BaseHTTPRequestHandler):
    """What `HfApi.upload_folder` asks for small files, and what diffusers asks to download them again."""

    calls: list[tuple[str, dict]]  # path and body of each POST
    files: dict[str, bytes]

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        lines = [json.loads(line) for line in body.splitlines()]
        self.calls.append((self.path, lines[0]))
        place = f"http://localhost:{self.server.server_port}/{NAME}"
        answer: dict[str, object] = {"url": place, "commitUrl": f"{place}/commit/1", "commitOid": "1"}
        if "/preupload/" in self.path:
            names = [file["path"] for file in lines[0]["files"]]
            answer["files"] = [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]
        for line in lines if "/commit/" in self.path else ():
            if line["key"] == "file":
                self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        self.answer(answer)

    def do_GET(self):
        if "/tree/" in self.path:
            facts = {name: {"size": len(data), "oid": COMMIT} for name, data in self.files.items()}
            self.answer([{"type": "file", "path": name, **fact} for name, fact in facts.items()])
        elif self.path.startswith("/api/"):
            siblings = [{"rfilename": name} for name in self.files]
            self.answer({"id": NAME, "sha": COMMIT, "private": False, "siblings": siblings})
        else:
            data = self.files[self.path.removeprefix(f"/{NAME}/resolve/{COMMIT}/")]
            tag = f'"{hashlib.sha256(data).hexdigest()}"'
            self.answer(data, {"ETag": tag, "X-Repo-Commit": COMMIT})

    do_HEAD = do_GET

    def answer(self, content, headers=None):
        allowed = self.headers["Authorization"] == "Bearer right"
        content = content if allowed else {"error": "wrong token"}
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(200 if allowed else 401)
        for key, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch):
    """A hub that takes the token "right", which is set."""
    handler = type("OneHub", (Hub,), {"calls": [], "files": {}})
    with contextlib.closing(ThreadingHTTPServer(("localhost", 0), handler)) as server:
        server.close = server.server_close
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://localhost:{server.server_port}")
        monkeypatch.setenv("HF_TOKEN", "right")
        yield handler
        server.shutdown()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run with a validation after each of two steps."""
    folder = tmp_path_factory.mktemp("pushed") / "run"
    words = flags({"steps": 2, "checkpoint-every": 1, "validate-every": 1, "validation.num-videos": 1})
    run("dance_grpo", folder, *words, *flags({"student.ema-decay": 0.5, "student.adapter.rank": 2}))
    return folder


def pushed(folder, *words: str) -> None:
    assert main(["push", str(folder), NAME, *words]) == 0


def exported(saved, folder):
    """The run's EMA weights, as a folder of the name that the model has on the hub."""
    assert main(["export", f"{saved}:ema", str(folder / "student")]) == 0
    return folder / "student"


def test_an_export_is_uploaded_as_it_is(saved, tmp_path, hub, capsys):
    """All files of the folder and no other, in one commit to the branch that is named."""
    out = tmp_path / "out"
    assert main(["export", f"{saved}@1:ema", str(out), "--adapter", "published"]) == 0
    pushed(out, "--private", "--revision", "trial")
    assert hub.files == files_of(out) and "model.safetensors" in hub.files
    paths = [path for path, _ in hub.calls]
    assert paths[:2] == ["/api/repos/create", f"/api/models/{NAME}/branch/trial"]
    assert [path for path in paths if "/commit/" in path] == [f"/api/models/{NAME}/commit/trial"]
    created = hub.calls[0][1]
    assert (created["organization"], created["name"], created["visibility"]) == ("team", "student", "private")
    assert f"{out} is on the hub: http://localhost" in capsys.readouterr().out


def test_diffusers_samples_with_what_the_hub_gives_back(saved, tmp_path, hub):
    """The card's code, with the name on the hub, makes the video of `sample` without this package."""
    pushed(exported(saved, tmp_path))
    assert {"model_index.json", "pipeline.py", "scheduler/sampler.json", "contact_sheet.png"} < hub.files.keys()
    card = hub.files["README.md"].decode()
    assert "\n# student\n" in card and "| weights | student (EMA), adapter of rank 2, alpha 2, fp32 |" in card
    assert not any("/branch/" in path for path, _ in hub.calls) and "visibility" not in hub.calls[0][1]
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    words = [sys.executable, "-c", code.replace('"student"', f'"{NAME}"') + SAVED]
    places = {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": constants.ENDPOINT, "PYTHONPATH": ""}
    subprocess.run(words, cwd=tmp_path, env=os.environ | places, check=True, capture_output=True)
    ours = next(videos(load_role(f"{saved}:ema", "student", None, ALONE, causal=True), Request.of([PROMPT]), 0, 1))[0]
    theirs = torch.from_numpy(np.load(tmp_path / "frames.npy"))
    torch.testing.assert_close(theirs, ours.movedim(0, 3), rtol=0, atol=1e-5)  # the adapter is merged
    assert float(ours.std()) > 0.01


def test_what_cannot_be_pushed_is_refused_first(saved, tmp_path, hub, capsys, monkeypatch):
    assert "push needs OWNER/NAME, such as my-team/student" in refused(capsys, "push", saved, "student")
    assert "cannot be a name on the hub" in refused(capsys, "push", saved, "team/a b")
    assert "unified_trainer.json is missing; name a folder that `export` wrote" in refused(capsys, "push", saved, NAME)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_STORED_TOKENS_PATH", str(tmp_path / "no-tokens"))
    assert "push needs a token of the Hugging Face hub: run `hf auth login`" in refused(
        capsys, "push", tmp_path / "x", NAME
    )
    assert not hub.calls


def test_the_answer_of_the_hub_is_shown(saved, tmp_path, hub, capsys, monkeypatch):
    assert main(["export", str(saved), str(tmp_path / "out"), "--adapter", "peft"]) == 0
    monkeypatch.setenv("HF_TOKEN", "wrong")
    assert f"push to {NAME}: " in (said := refused(capsys, "push", tmp_path / "out", NAME)) and "wrong token" in said
    monkeypatch.setattr(constants, "ENDPOINT", "http://localhost:9")
    assert f"push to {NAME}: " in refused(capsys, "push", tmp_path / "out", NAME)


# The model card.


def test_the_card_says_what_was_trained(saved, tmp_path):
    """It holds the validation up to the exported step, its picture, and no path of this machine."""
    assert main(["export", f"{saved}@1", str(tmp_path / "mine"), "--adapter", "peft"]) == 0
    card = (tmp_path / "mine" / "README.md").read_text()
    front = yaml.safe_load(card.split("---\n")[1])
    assert front == {
        "library_name": "diffusers",
        "pipeline_tag": "text-to-video",
        "tags": ["unified-trainer", "dance_grpo", "lora"],
    }
    for line in (
        "# mine",
        "| base model | wan |",
        "| method | dance_grpo, step 1 |",
        "| recipe | tiny |",
        "| weights | student, adapter of rank 2, alpha 2, fp32 |",
        "| videos | 5 frames of 32 x 32 pixels, 8 per second |",
        "| reward | hpsv3 (weight 1) |",
        "## Validation after step 1",
    ):
        assert f"\n{line}\n" in card
    metrics = [json.loads(line) for line in (saved / "metrics.jsonl").read_text().splitlines()]
    (reward,) = [row["validation/reward"] for row in metrics if row["step"] == 1 and "validation/reward" in row]
    assert f"| reward | {reward:.4g} |" in card
    picture = saved / "validation" / "step_1" / "contact_sheet.png"
    assert (tmp_path / "mine" / "contact_sheet.png").read_bytes() == picture.read_bytes()
    for file, content in files_of(tmp_path / "mine").items():
        assert str(tmp_path).encode() not in content and str(saved.parent).encode() not in content, file


@pytest.mark.parametrize("line", [b"[" * 200_000, b"\xff\0", b'{"step": "x", "validation/reward": 1}', b"[1]"])
def test_damaged_lines_of_metrics_are_left_out_of_the_card(saved, tmp_path, line):
    sound = model_card._validation(saved, 1)[1]
    copied = copy_of(saved, tmp_path / "copied")
    with (copied / "metrics.jsonl").open("ab") as file:
        file.write(line + b"\n")
    assert sound and model_card._validation(copied, 1)[1] == sound


def test_a_run_without_validations_has_no_table_of_them(saved, tmp_path):
    copied = copy_of(saved, tmp_path / "copied")
    (copied / "metrics.jsonl").unlink()
    assert main(["export", str(copied), str(tmp_path / "out"), "--adapter", "peft"]) == 0
    assert "## Validation" not in (tmp_path / "out" / "README.md").read_text()


def test_a_base_from_the_hub_is_named(tmp_path):
    cached = (
        tmp_path
        / "models--Wan-AI--Wan2.1-T2V-1.3B-Diffusers"
        / "snapshots"
        / "0fad780a534b6463e45facd96134c9f345acfa5b"
    )
    assert model_card.base_of(cached) == ("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", True)
    assert model_card.base_of(tmp_path / "mine") == ("mine", False)
