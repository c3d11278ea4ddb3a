"""Export: diffusers and peft load the weights of a checkpoint, and nothing else is needed for it."""

import fcntl
import json
import os
import shutil
from functools import partialmethod

import diffusers
import numpy as np
import pytest
import torch
import yaml
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from helpers import WAN, assert_near, assert_same, checkpoint_of, copy_of, files_of, fill_disk, flags, refused, run
from hypothesis import given
from hypothesis import strategies as st
from peft import PeftModel
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from unified_trainer.__main__ import main
from unified_trainer.models.wan.model import WanModel
from unified_trainer.numerics.chunks import ChunkConfig
from unified_trainer.sampling.solver import SamplerConfig
from unified_trainer.tools.export.scheduler import euler_scheduler

pytestmark = pytest.mark.slow

MOVING = flags({"student.ema-decay": 0.5, "student.learning-rate": 1e-2, "student.warmup-updates": 0})
BESIDE = ("README.md", "pipeline.py", "scheduler", "unified_trainer.json")
NATIVE = ("diffusion_pytorch_model.safetensors", "config.json")
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of all weights with EMA, and checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run("dance_grpo", folder, "--steps", "2", "--checkpoint-every", "1", *MOVING)
    return folder


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A run that trains an adapter."""
    folder = tmp_path_factory.mktemp("adapted") / "run"
    run("dance_grpo", folder, "--steps", "2", "--student.adapter.rank", "2", *MOVING)
    return folder


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def exported(*arguments: object) -> None:
    assert main(["export", *map(str, arguments)]) == 0


def held(folder, step: int, kind: str) -> dict[str, torch.Tensor]:
    prefix = f"student/{kind}/"
    return {key.removeprefix(prefix): v for key, v in checkpoint_of(folder, step).items() if key.startswith(prefix)}


@torch.no_grad()
def velocity(network) -> torch.Tensor:
    model = WanModel(network)
    return model.velocity(*model.example())


# Weights.


@pytest.mark.parametrize(("spec", "step", "kind"), [("", 2, "weights"), ("@1", 1, "weights"), (":ema", 2, "ema")])
def test_diffusers_loads_the_very_weights(saved, out, spec, step, kind):
    exported(f"{saved}{spec}", out)
    pipeline = WanPipeline.from_pretrained(out)
    assert_same(dict(pipeline.transformer.state_dict()), held(saved, step, kind))


def test_an_adapter_is_folded_in(adapted, out):
    """Compare with base + alpha / rank B A, computed from the checkpoint's tensors."""
    exported(adapted, out)
    low_rank = held(adapted, 2, "weights")
    expected = load_file(WAN / WEIGHTS)
    touched = {key.split(".lora_")[0] for key in low_rank}
    for layer in touched:
        delta = low_rank[f"{layer}.lora_B.weight"] @ low_rank[f"{layer}.lora_A.weight"]
        assert float(delta.abs().max()) > 0
        expected[f"{layer}.weight"] += delta
    written = load_file(out / WEIGHTS)
    assert_near(written, expected, 1e-6)
    assert not torch.equal(written[f"{layer}.weight"], load_file(WAN / WEIGHTS)[f"{layer}.weight"])


def test_an_adapter_alone_in_pefts_layout(adapted, tmp_path):
    exported(adapted, tmp_path / "alone", "--adapter", "peft")
    exported(adapted, tmp_path / "merged")
    assert {path.name for path in (tmp_path / "alone").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "pytorch_lora_weights.safetensors",
        *BESIDE,
    }
    of_the_run = {(path.is_dir(), path.stat().st_mode) for path in adapted.rglob("*")}
    assert {(path.is_dir(), path.stat().st_mode) for path in (tmp_path / "alone").rglob("*")} <= of_the_run
    network = WanTransformer3DModel.from_pretrained(WAN / "transformer")
    base = velocity(network)
    PeftModel.from_pretrained(network, tmp_path / "alone")
    merged = WanTransformer3DModel.from_pretrained(tmp_path / "merged" / "transformer")
    torch.testing.assert_close(velocity(network), velocity(merged), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(velocity(network), base, atol=1e-4)


def test_bf16_rounds_what_diffusers_loads_rounded(saved, out):
    exported(saved, out, "--dtype", "bf16")
    whole = held(saved, 2, "weights")
    for key, value in load_file(out / WEIGHTS).items():
        half = not {"time_embedder", "scale_shift_table", "norm2"} & set(key.split("."))
        assert value.dtype == (torch.bfloat16 if half else torch.float32), key
        assert torch.equal(value, whole[key].to(value.dtype)), key
    pipeline = WanPipeline.from_pretrained(out, dtype=torch.bfloat16)
    assert pipeline.transformer.dtype == torch.bfloat16


def test_large_weights_are_sharded(saved, out, monkeypatch):
    """As diffusers does from 10 GB on, here from 300 kB on."""
    in_parts = partialmethod(WanTransformer3DModel.save_pretrained, max_shard_size="300KB")
    monkeypatch.setattr(WanTransformer3DModel, "save_pretrained", in_parts)
    exported(saved, out)
    assert len(list((out / "transformer").glob("*-of-*.safetensors"))) > 1
    assert (out / "transformer" / "diffusion_pytorch_model.safetensors.index.json").is_file()
    loaded = WanTransformer3DModel.from_pretrained(out / "transformer")
    assert_same(dict(loaded.state_dict()), held(saved, 2, "weights"))


def test_what_is_written_is_compared_with_what_is_in_memory(saved, out, monkeypatch, capsys):
    """A file that was written wrong is not kept."""
    original = WanTransformer3DModel.save_pretrained

    def spoil(self, folder, **options):
        original(self, folder, **options)
        file = folder / "diffusion_pytorch_model.safetensors"
        tensors = load_file(file)
        tensors["proj_out.bias"][0] += 1e-3
        save_file(tensors, file, metadata={"format": "pt"})

    monkeypatch.setattr(WanTransformer3DModel, "save_pretrained", spoil)
    assert "proj_out.bias is not written as it is in memory" in refused(capsys, "export", saved, out)
    assert not any(out.parent.iterdir())


# In the layout of Wan's own code.


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_file_by_wans_names_is_imported_again_to_the_bit(saved, out, tmp_path, dtype):
    exported(saved, tmp_path / "ours", "--dtype", dtype)
    exported(saved, out, "--layout", "wan", "--dtype", dtype)
    assert {path.name for path in out.iterdir()} == {*NATIVE, "README.md", "unified_trainer.json"}
    assert main(["import-weights", str(out), str(tmp_path / "again"), "--base", "tiny", "--dtype", dtype]) == 0
    assert files_of(tmp_path / "again" / "transformer") == files_of(tmp_path / "ours" / "transformer")
    held, theirs = load_file(tmp_path / "ours" / WEIGHTS), load_file(out / NATIVE[0])
    assert torch.equal(theirs["blocks.0.self_attn.q.weight"], held["blocks.0.attn1.to_q.weight"])
    assert torch.equal(theirs["head.modulation"], held["scale_shift_table"]) and len(theirs) == len(held)
    config = json.loads((out / NATIVE[1]).read_text())
    assert {key: config[key] for key in ("_class_name", "model_type", "dim", "in_dim", "num_layers")} == {
        "_class_name": "WanModel",
        "model_type": "t2v",
        "dim": 96,
        "in_dim": 16,
        "num_layers": 5,
    }
    assert "diffusers" not in (out / "README.md").read_text()


def test_an_adapter_by_wans_names(adapted, out, tmp_path, capsys):
    """Merged into one file, or alone as a published adapter; peft's layout has other names."""
    exported(adapted, out, "--layout", "wan")
    exported(adapted, tmp_path / "merged")
    theirs, held = load_file(out / NATIVE[0]), load_file(tmp_path / "merged" / WEIGHTS)
    assert torch.equal(theirs["blocks.0.cross_attn.o.weight"], held["blocks.0.attn2.to_out.0.weight"])
    exported(adapted, tmp_path / "alone", "--layout", "wan", "--adapter", "published")
    assert {path.name for path in (tmp_path / "alone").iterdir()} == {
        "model.safetensors",
        "README.md",
        "unified_trainer.json",
    }
    absent = tmp_path / "absent"
    words = ("--layout", "wan", "--adapter", "peft")
    assert "take --adapter published" in refused(capsys, "export", adapted, absent, *words)
    assert "Have: diffusers, wan" in refused(capsys, "export", adapted, absent, "--layout", "comfy")
    assert not absent.exists()


# The rest of the folder.


@pytest.mark.parametrize("how", ["link", "copy"])
def test_components_are_linked_or_copied(saved, out, how):
    before = files_of(WAN)
    exported(saved, out, "--components", how)
    for name in ("vae/diffusion_pytorch_model.safetensors", "text_encoder/config.json", "tokenizer/tokenizer.json"):
        assert (out / name).read_bytes() == (WAN / name).read_bytes()
        same_disk = WAN.stat().st_dev == out.stat().st_dev
        assert (out / name).samefile(WAN / name) == (how == "link" and same_disk)
    assert files_of(WAN) == before
    config = json.loads((out / "transformer" / "config.json").read_text())
    assert config.get("_name_or_path", "") == ""


def test_weights_without_components(saved, out):
    exported(saved, out, "--components", "none")
    assert {path.name for path in out.iterdir()} == {"transformer", *BESIDE}


def test_the_folder_says_what_it_is(saved, out, capsys):
    exported(f"{saved}@1:ema", out)
    about = json.loads((out / "unified_trainer.json").read_text())
    assert (about["step"], about["from"], about["method"]) == (1, "run@1:ema", "DanceGRPO")
    assert about["sampler"]["num_steps"] == 4
    out_text = capsys.readouterr().out
    assert f"student (EMA) from {saved / 'checkpoints' / 'step_1'}" in out_text
    assert "num_inference_steps=4, guidance_scale=1.0" in out_text


def test_an_export_is_where_another_run_starts(saved, out, tmp_path):
    exported(saved, out)
    run("finetune", tmp_path / "next", "--recipe", "tiny", "--student.path", str(out), "--student.learning-rate", "0")
    assert_same(held(tmp_path / "next", 1, "weights"), held(saved, 2, "weights"))


# Missing files that are not needed.


def test_no_other_role_and_no_data_are_read(saved, out, tmp_path):
    """The files of prompts, reward and optimizer are missing or damaged, and the base was moved."""
    copied, moved = copy_of(saved, tmp_path / "copied"), copy_of(WAN, tmp_path / "moved")
    config = yaml.safe_load((copied / "config.yaml").read_text())
    config["reward"]["path"] = config["prompts"] = config["student"]["path"] = "/absent"
    (copied / "config.yaml").write_text(yaml.safe_dump(config))
    for kind in ("optimizer", "ema"):
        (file,) = (copied / "checkpoints" / "step_2" / "student" / kind).iterdir()
        file.write_bytes(bytes(file.stat().st_size))
    exported(copied, out, "--base", moved)
    assert_same(load_file(out / WEIGHTS), held(saved, 2, "weights"))


# Refused.


def test_errors_name_what_is_missing(saved, out, tmp_path, capsys):
    assert "has no checkpoint of step 7; it has 1, 2" in refused(capsys, "export", f"{saved}@7", out)
    assert "--role teacher; have student" in refused(capsys, "export", saved, out, "--role", "teacher")
    assert "absent holds no complete checkpoint" in refused(capsys, "export", tmp_path / "absent", out)
    assert "trained all weights of student; leave it out" in refused(capsys, "export", saved, out, "--adapter", "peft")
    assert not out.exists()


def test_missing_ema_weights_are_named(tmp_path, out, capsys):
    run("dance_grpo", tmp_path / "run", "--student.ema-decay", "0")
    assert "holds no EMA weights of student; leave :ema out" in refused(
        capsys, "export", f"{tmp_path / 'run'}:ema", out
    )


def test_a_folder_with_something_in_it_is_left_alone(saved, out, capsys):
    out.mkdir()
    (out / "mine").write_text("mine")
    assert f"{out} exists and is not an empty folder" in refused(capsys, "export", saved, out)
    assert files_of(out) == {"mine": b"mine"}


def test_damaged_weights_are_never_exported(saved, out, tmp_path, capsys):
    copied = copy_of(saved, tmp_path / "copied")
    (file,) = (copied / "checkpoints" / "step_2" / "student" / "weights").iterdir()
    data = bytearray(file.read_bytes())
    data[-9] ^= 64
    file.write_bytes(data)
    message = refused(capsys, "export", copied, out)
    assert "is damaged" in message and f"choose another step with {copied}@STEP" in message
    exported(f"{copied}@1", out)
    shutil.rmtree(out)


# The scheduler.


@given(
    num_steps=st.integers(1, 60),
    shift=st.floats(0.3, 15),
    solver=st.sampled_from(["ode", "sde"]),
)
def test_diffusers_visits_our_noise_levels(num_steps, shift, solver):
    sampler = SamplerConfig(num_steps=num_steps, shift=shift, solver=solver)
    scheduler = euler_scheduler(sampler, given=False)
    read = FlowMatchEulerDiscreteScheduler.from_config(scheduler.config)
    read.set_timesteps(num_steps)
    torch.testing.assert_close(read.sigmas.double(), sampler.sigmas(), rtol=0, atol=1e-6)
    assert read.config.stochastic_sampling == (solver == "sde")


def test_evenly_spaced_step_sigmas_have_a_scheduler_others_have_none():
    def of(*levels: float) -> SamplerConfig:
        return SamplerConfig(num_steps=len(levels), step_sigmas=levels, shift=5.0)

    for even in (of(1.0, 0.75, 0.5, 0.25), of(1.0, 0.9, 0.8), of(1.0)):
        scheduler = euler_scheduler(even, given=False)
        torch.testing.assert_close(scheduler.sigmas.double(), even.sigmas(), rtol=0, atol=1e-6)
    assert euler_scheduler(of(1.0, 0.7, 0.5, 0.25), given=False) is None
    assert euler_scheduler(of(0.9, 0.6, 0.3), given=False) is None
    assert euler_scheduler(SamplerConfig(num_steps=4, chunks=ChunkConfig(chunk_frames=1)), given=False) is None


@given(num_steps=st.integers(1, 60), shift=st.floats(0.3, 15))
def test_a_pipeline_that_gives_its_levels_visits_ours(num_steps, shift):
    """As those of Qwen-Image, FLUX and LTX do: 1, (n - 1) / n, ... 1 / n, which the scheduler shifts."""
    sampler = SamplerConfig(num_steps=num_steps, shift=shift)
    read = FlowMatchEulerDiscreteScheduler.from_config(euler_scheduler(sampler, given=True).config)
    read.set_timesteps(sigmas=np.linspace(1.0, 1 / num_steps, num_steps))
    torch.testing.assert_close(read.sigmas.double(), sampler.sigmas(), rtol=0, atol=1e-6)


# What stands in the way.


@pytest.mark.parametrize("name", [".out-*", "unified_trainer.json", "diffusion_*"])
def test_a_full_disk_is_one_error_and_nothing_stays(saved, out, monkeypatch, capsys, name):
    def no_space(*_, **__):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    if name.startswith("diffusion_"):  # written by a library with an exception of its own
        monkeypatch.setattr(diffusers.models.modeling_utils.safetensors.torch, "save_file", no_space)
    fill_disk(monkeypatch, name)
    said = refused(capsys, "export", saved, out, "--components", "none")
    assert said.startswith(f"error: no space to write {out} (") and "Traceback" not in said
    assert not any(out.parent.iterdir())


def test_what_a_killed_export_left_is_removed_and_said(saved, out, capsys):
    """Not what another one is writing, nor a folder that only has such a name."""
    left, locked, other = (out.parent / name for name in (".out-ab_12xyz", ".out-live1234", ".out-archived"))
    for folder, inner in ((left, "out"), (locked, "out"), (other, "mine")):
        (folder / inner).mkdir(parents=True)
    lock = os.open(locked, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    exported(saved, out, "--components", "none")
    os.close(lock)
    said = capsys.readouterr().out
    assert sorted(path.name for path in out.parent.iterdir()) == [".out-archived", ".out-live1234", "out"]
    assert f"removed {left}, which is not finished" in said
    assert f"another process may be writing {locked}, which is not finished" in said
