"""Names of version 0.1.0: refused as flags with the new name, and translated in saved files and checkpoints."""

import json
import re
import zlib
from pathlib import Path

import pytest
import yaml
from helpers import SMALL, assert_same, checkpoint_of, copy_of, flags, metrics_of, run
from safetensors import safe_open
from safetensors.torch import save_file

from unified_trainer import renamed
from unified_trainer.__main__ import main
from unified_trainer.checkpoint import manifest
from unified_trainer.config import plain, run_class
from unified_trainer.registry import METHODS

pytestmark = pytest.mark.slow

# Old settings and their new names: every row of the table of the package, for every role that has the setting.
SETTINGS = {
    "student.clip_norm": "student.max_grad_norm",
    "student.high.clip_norm": "student.high.max_grad_norm",
    "student.low.clip_norm": "student.low.max_grad_norm",
    "critic.clip_norm": "critic.max_grad_norm",
    "critic.high.clip_norm": "critic.high.max_grad_norm",
    "critic.low.clip_norm": "critic.low.max_grad_norm",
    "student.decay": "student.lr_schedule",
    "critic.decay": "critic.lr_schedule",
    "student.decay_updates": "student.lr_decay_updates",
    "critic.decay_updates": "critic.lr_decay_updates",
    "algorithm.keep_samples": "algorithm.best_of_n",
    "algorithm.refill_rounds": "algorithm.dynamic_sampling_rounds",
    "algorithm.shape.dual_clip": "algorithm.objective_parameters.dual_clip",
    "algorithm.shape.alpha": "algorithm.objective_parameters.alpha",
    "algorithm.shape.tau_pos": "algorithm.objective_parameters.tau_pos",
    "algorithm.shape.tau_neg": "algorithm.objective_parameters.tau_neg",
    "algorithm.shape.beta_low": "algorithm.objective_parameters.beta_low",
    "algorithm.shape.beta_high": "algorithm.objective_parameters.beta_high",
    "algorithm.calendar": "algorithm.update_schedule",
    "algorithm.critic_first": "algorithm.critic_warmup_steps",
    "sampler.step_list": "sampler.step_sigmas",
    "parallel.reshard": "parallel.reshard_after_forward",
    "parallel.gradients": "parallel.reduce_gradients",
    "validation.averaged": "validation.ema",
    "sentinel.action": "hacking_monitor.action",
    "sentinel.rise": "hacking_monitor.rise",
    "sentinel.fall": "hacking_monitor.fall",
    "sentinel.drift": "hacking_monitor.drift",
    "sentinel.collapse": "hacking_monitor.collapse",
}
# Two switches that became one setting.
SWITCHES = {
    "activation_checkpointing": "activation_memory full",
    "keep_products": "activation_memory selective",
    "selective_checkpointing": "activation_memory selective",
}
BALANCE = {"finetune": "student.expert_balance", "dmd2": "critic.expert_balance"}
REMOVED = ("teacher.activation_checkpointing", "teacher.keep_products")
# Sections that files of 0.1.0 hold for every method.
FOREIGN = {
    "teacher": {"path": "", "activation_checkpointing": False, "keep_products": False, "compile": False},
    "critic": {"path": "", "clip_norm": 1.0, "decay": "constant", "high": {"clip_norm": None}, "keep_products": False},
}


def flat(tree: dict, prefix: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def nested(settings: dict[str, object]) -> dict:
    tree: dict = {}
    for key, value in settings.items():
        *sections, name = key.split(".")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
    return tree


# Flags.


@pytest.fixture
def refused(run_folder, capsys):
    """Run with these flags, which must be refused with exit code 2 before a file is written; return the message."""

    def attempt(*words: str, method: str = "dance_grpo") -> str:
        assert main(["--method", method, "--output", str(run_folder), *words]) == 2
        assert not run_folder.exists()
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return attempt


def test_every_row_of_the_table_is_tested():
    known = [*SETTINGS, *REMOVED, *(f"student.{switch}" for switch in SWITCHES)]
    assert all(any(re.fullmatch(old, key) for key in known) for old, _ in renamed.SETTINGS)


@pytest.mark.parametrize(("old", "new"), SETTINGS.items())
def test_a_renamed_setting_is_refused_with_its_new_name(refused, old, new):
    written = f"--{new.replace('_', '-')}"
    message = refused(f"--{old.replace('_', '-')}", "1")
    assert message.startswith(f"error: --{old.replace('_', '-')}: renamed to {written}")
    assert ("in [0, 1] instead of thousandths" in message) == (old == "sampler.step_list")
    assert f"--{old}: renamed to {written}" in refused(f"--{old}=1", method="dmd2")
    assert any(new in flat(plain(run_class(method)())) for method in METHODS.values())  # the new name is a setting


@pytest.mark.parametrize(("method", "new"), BALANCE.items())
def test_the_balance_of_experts_is_now_a_setting_of_the_role(refused, method, new):
    message = refused("--algorithm.expert-balance", "natural", method=method)
    assert f"--algorithm.expert-balance: renamed to --{new.replace('_', '-')}" in message
    assert new in flat(plain(run_class(METHODS[method])()))


@pytest.mark.parametrize(("old", "new"), SWITCHES.items())
def test_a_switch_of_recomputation_is_refused_with_the_setting_that_took_its_place(refused, old, new):
    flag = f"--student.{old.replace('_', '-')}"
    assert f"{flag}: renamed to --student.{new.replace('_', '-')}" in refused(flag)


@pytest.mark.parametrize(
    ("on", "kept", "now"), [(False, False, "none"), (True, False, "full"), (True, True, "selective")]
)
@pytest.mark.parametrize("switch", ["keep_products", "selective_checkpointing"])
def test_saved_switches_of_recomputation_become_one_setting(on, kept, now, switch):
    saved = {"student.activation_checkpointing": on, f"student.{switch}": kept}
    known = flat(plain(run_class(METHODS["finetune"])()))
    assert renamed.translate_settings(saved, "finetune", known) == {"student.activation_memory": now}


@pytest.mark.parametrize("old", REMOVED)
def test_a_removed_setting_is_refused_with_the_way_out(refused, old):
    flag = f"--{old.replace('_', '-')}"
    assert f"{flag} was removed" in refused(flag, "True", method="dmd2")


@pytest.mark.parametrize(("old", "new"), renamed.METRICS.items())
def test_a_renamed_metric_is_refused_with_its_new_name(refused, old, new):
    message = refused(*SMALL["dance_grpo"], "--keep-best", "1", "--validate-every", "1", "--best-metric", old)
    assert message == f"error: best_metric {old}: renamed to {new}"


# Saved files.


OLD_SETTINGS = {new: old for old, new in SETTINGS.items()}
OLD_METRICS = {new: old for old, new in renamed.METRICS.items()}


def old_config(settings: dict[str, object], method: str) -> dict:
    """Return the settings of a run as 0.1.0 wrote them."""
    balanced = BALANCE.get(method, "")
    found = {OLD_SETTINGS.get(key, key): value for key, value in settings.items() if "expert_balance" not in key}
    for role in ("student", "critic"):
        if f"{role}.activation_memory" in found:
            how = found.pop(f"{role}.activation_memory")
            found |= {f"{role}.activation_checkpointing": how != "none", f"{role}.keep_products": how == "selective"}
    found["sampler.step_list"] = [1000 * sigma for sigma in found["sampler.step_list"]]
    if balanced:
        found["algorithm.expert_balance"] = settings[balanced]
    sections = {name: section for name, section in FOREIGN.items() if f"{name}.path" not in settings}
    if "teacher.path" in settings:
        found |= dict.fromkeys(REMOVED, False)
    return nested(flat(sections) | found)


# Entries of a manifest that 0.1.0 did not write, or wrote under another name.
NEWER = ("crc32", "hacking_monitor", "guard", "rollbacks", "stopped_by", "noise_generator")


def old_manifest(metadata: dict) -> dict:
    """Return a checkpoint's metadata as 0.1.0 wrote it."""
    found = {key: value for key, value in metadata.items() if key not in NEWER}
    found["sentinel"] = {OLD_METRICS.get(key, key): value for key, value in metadata.get("hacking_monitor", {}).items()}
    found["metrics"] = {OLD_METRICS.get(key, key): value for key, value in metadata["metrics"].items()}
    if sampler := dict(found["sampler"] or {}):
        sampler["step_list"] = [1000 * sigma for sigma in sampler.pop("step_sigmas")]
        found["sampler"] = sampler
    return found


def rename_state(folder: Path, new: str, old: str) -> None:
    """Move a kind of state to its old folder, with its old name in the files."""
    (folder / old).parent.mkdir(exist_ok=True)
    (folder / new).rename(folder / old)
    for file in (folder / old).glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            tensors = {key.replace(new, old, 1): opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
            metadata = {key: value.replace(new, old) for key, value in opened.metadata().items()}
        save_file(tensors, file, metadata=metadata)
    if not any((folder / new).parent.iterdir()):
        (folder / new).parent.rmdir()


def as_of_0_1_0(run_folder: Path, method: str) -> set[str]:
    """Rewrite a run's config.yaml and checkpoints with the names of 0.1.0; return the kinds of state it has."""
    file = run_folder / "config.yaml"
    settings = flat(yaml.safe_load(file.read_text()))
    file.write_text(yaml.safe_dump(old_config(settings, method), sort_keys=False))
    kinds: set[str] = set()
    for folder in manifest.folders(run_folder / "checkpoints"):
        metadata = old_manifest(json.loads((folder / manifest.FILE).read_text()))
        for new, old in renamed.STATE.items():
            if (folder / new).is_dir():
                rename_state(folder, new, old)
        names = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != manifest.FILE)
        metadata["files"] = {
            str(path.relative_to(folder)): {"bytes": path.stat().st_size, "crc32": zlib.crc32(path.read_bytes())}
            for path in names
        }
        (folder / manifest.FILE).write_text(manifest.as_text(metadata))
        kinds |= {str(path.parent.relative_to(folder)) for path in names}
    return kinds


SHORT = {"checkpoint-every": 1, "validate-every": 1, "validation.num-videos": 0, "keep-best": 1}
SHORT |= {"video.frames": 5, "video.height": 32, "video.width": 32, "reward.frames": "first"}
SHORT |= {"student.ema-decay": 0.5, "student.lr-schedule": "linear", "student.lr-decay-updates": 10}
STEPS = {"sampler.num-steps": 2, "sampler.shift": 5}
RUNS = {
    # A boundary makes two experts of one network: the reference is then a weight copy with a state of its own.
    "dance_grpo": SHORT
    | STEPS
    | {"student.boundary": 0.9, "algorithm.kl-coefficient": 0.1, "algorithm.failure-below": 100}
    | {"algorithm.objective-parameters.dual-clip": 4.0, "hacking-monitor.rise": 0.4},
    "dmd2": SHORT
    | STEPS
    | {"algorithm.batch-size": 2, "algorithm.micro-batch": 1, "algorithm.critic-warmup-steps": 1}
    | {"critic.learning-rate": 1e-3, "critic.max-grad-norm": 0.5, "validation.num-samples": 2},
    "diffusion_nft": SHORT | STEPS,
}
GROUPS = {"algorithm.num-prompts": 2, "algorithm.num-samples": 2, "algorithm.prompts-per-update": 2}
GROUPS |= {"algorithm.rollout-batch": 4, "algorithm.update-batch": 4, "validation.num-samples": 2}
RUNS["dance_grpo"] |= GROUPS
RUNS["diffusion_nft"] |= GROUPS
KINDS = {
    "dance_grpo": {"feed/failures", "reference/followed"},
    "dmd2": set(),
    "diffusion_nft": {"old/followed"},
}


@pytest.mark.parametrize("method", RUNS)
def test_a_run_of_0_1_0_resumes(tmp_path, capsys, method):
    """Bit for bit as the run that has the present names; only the older one is told that its noise changes."""
    new, old = tmp_path / "new", tmp_path / "old"
    words = flags({"method": method, "steps": 2} | RUNS[method])
    assert main([*words, "--sampler.step-sigmas", "1", "0.75", "--output", str(new)]) == 0
    kinds = as_of_0_1_0(copy_of(new, old), method)
    assert KINDS[method] <= kinds and not kinds & renamed.STATE.keys()
    assert yaml.safe_load((old / "config.yaml").read_text())["sampler"]["step_list"] == [1000, 750]
    said = {}
    for folder in (new, old):
        capsys.readouterr()
        assert main(["--resume", str(folder), "--steps", "4"]) == 0
        said[folder] = [
            line for line in capsys.readouterr().out.splitlines() if line.startswith(("chan", "cont", "skip", "warn"))
        ]
    assert said[new] == ["continuing after step 2", "changed steps: 2 -> 4"]
    *before, warning = said[old]
    assert before == said[new] and "step_2 is of a version with another noise generator" in warning
    assert_same(checkpoint_of(old, 4), checkpoint_of(new, 4))
    assert metrics_of(old) == metrics_of(new)
    assert (old / "config.yaml").read_text() == (new / "config.yaml").read_text()
    manifests = [json.loads((folder / "checkpoints/step_4/manifest.json").read_text()) for folder in (new, old)]
    for each in manifests:
        # The guard's window begins anew: 0.1.0 had none.
        each.pop("crc32"), each.pop("files"), each.pop("guard", None)
    assert manifests[0] == manifests[1]


def test_a_run_starts_from_a_student_of_0_1_0(tmp_path):
    """The sampler that it was trained for comes along, with its step sigmas."""
    new, old = tmp_path / "new", tmp_path / "old"
    words = flags({"method": "dmd2", "steps": 1} | RUNS["dmd2"])
    assert main([*words, "--sampler.step-sigmas", "1", "0.75", "--output", str(new)]) == 0
    as_of_0_1_0(copy_of(new, old), "dmd2")
    for folder in (new, old):
        run("dance_grpo", tmp_path / f"from {folder.name}", "--init-from", str(folder), "--sampler.num-steps", "2")
    one, other = (tmp_path / f"from {folder.name}" for folder in (new, old))
    assert_same(checkpoint_of(one, 1), checkpoint_of(other, 1))
    saved = yaml.safe_load((other / "config.yaml").read_text())
    assert saved["sampler"]["step_sigmas"] == [1.0, 0.75] and saved["sampler"]["solver"] == "sde"


# A method of one's own whose settings have names that 0.1.0 used for others.
OWN = """
from dataclasses import dataclass

from unified_trainer.methods.base import Loss, Method, SingleUpdateConfig, trained


@dataclass(frozen=True)
class OwnConfig(SingleUpdateConfig):
    keep_samples: int = 0


class Own(Method):
    config_class = OwnConfig
    roles = {"student": trained(), "teacher": trained()}

    def step(self, batch, step, rng, mesh):
        x_t = rng.noise("x_t", batch.sample_ids, batch.latent_shape)
        for name in self.roles:
            velocity = getattr(self, name).velocity(x_t, rng.uniform(name, batch.sample_ids), batch.cond)
            yield Loss(name, velocity.square().mean())
"""


def test_a_setting_of_ones_own_may_have_an_old_name(tmp_path, capsys):
    """Settings that the run has are neither refused nor translated, from flags, --config and --resume."""
    (tmp_path / "own.py").write_text(OWN)
    words = {"method": f"{tmp_path / 'own.py'}:Own", "steps": 1, "validate-every": 0, "reward.frames": "first"}
    words |= {"video.frames": 5, "video.height": 32, "video.width": 32, "output": tmp_path / "run"}
    words |= {"algorithm.keep-samples": 3, "algorithm.batch-size": 2, "algorithm.micro-batch": 2}
    assert main([*flags(words), "--teacher.activation-memory", "full"]) == 0
    config = tmp_path / "run" / "config.yaml"
    assert main(["--config", str(config), "--output", str(tmp_path / "again")]) == 0
    assert main(["--resume", str(tmp_path / "run"), "--steps", "2"]) == 0
    for folder in ("run", "again"):
        saved = yaml.safe_load((tmp_path / folder / "config.yaml").read_text())
        assert saved["algorithm"]["keep_samples"] == 3 and saved["teacher"]["activation_memory"] == "full"
    assert "changed steps: 1 -> 2" in capsys.readouterr().out


def test_settings_and_metadata_are_translated():
    """Sections of other roles are left out, and values with another unit or name are converted."""
    saved = flat(FOREIGN) | {"student.clip_norm": 2.0, "sampler.step_list": [1000.0, 750.0], "best_metric": "judge"}
    expected = {"student.max_grad_norm": 2.0, "sampler.step_sigmas": [1.0, 0.75], "best_metric": "accuracy"}
    saved |= {"prompts": None, "validation.prompts": None, "data.path": None, "reward.device": ""}
    expected |= {"prompts": "tiny", "validation.prompts": "tiny", "data.path": "tiny", "reward.device": ""}
    known = flat(plain(run_class(METHODS["dance_grpo"])()))
    assert renamed.translate_settings(saved, "dance_grpo", known) == expected
    found = renamed.translate_metadata(
        {"sampler": None, "sentinel": {"judge": 0.5, "reward": 1.0}, "metrics": {"judge_colour": 1.0, "frechet": 3.0}}
    )
    assert found["hacking_monitor"] == {"accuracy": 0.5, "reward": 1.0}
    assert found["metrics"] == {"accuracy/color": 1.0, "frechet": 3.0} and "sentinel" not in found
    today = {"sampler": {"step_sigmas": [1.0]}, "hacking_monitor": {}, "metrics": {"k": 1.0}}
    assert renamed.translate_metadata(today) == today
