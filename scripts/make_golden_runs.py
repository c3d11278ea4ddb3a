"""Write tests/golden/runs.json: flags and metrics of a short run of every method, which test_golden_runs.py repeats.

    python scripts/make_golden_runs.py [NAME ...]

Run it after an intended change of numbers, and look at the difference in git. Names limit it to some runs.
"""

import json
import re
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console

from unified_trainer.__main__ import main as program

FILE = Path(__file__).resolve().parents[1] / "tests" / "golden" / "runs.json"
MACHINE = re.compile(r"^time$|per_second|seconds|memory|mfu")  # metrics that depend on the machine

SHORT = "--device cpu --validation.num-samples 2 --validation.num-videos 1 --checkpoint-every 0"
VIDEO = "--video.frames 5 --video.height 32 --video.width 32"
CLIPS = "--data.num-clips 4 --validate-every 0 --algorithm.batch-size 2 --algorithm.micro-batch 1"
PARTS = "--algorithm.batch-size 4 --algorithm.micro-batch 2"
GROUPS = (
    "--algorithm.num-prompts 4 --algorithm.num-samples 2 --algorithm.prompts-per-update 2 "
    "--algorithm.rollout-batch 4 --algorithm.update-batch 2"
)
SINGLES = (
    "--algorithm.num-prompts 8 --algorithm.num-samples 1 --algorithm.prompts-per-update 4 "
    "--algorithm.rollout-batch 4 --algorithm.update-batch 2"
)
RUNS = {
    "finetune": f"--method finetune {SHORT} {CLIPS} --steps 2 --validate-every 2 --sampler.num-steps 2",
    "finetune_experts": f"--method finetune {SHORT} {CLIPS} --steps 3 --sampler.num-steps 2 --student.boundary 0.8 "
    "--student.expert-balance equal --student.high.learning-rate 1e-4",
    "finetune_teacher_forcing": f"--method finetune {SHORT} {CLIPS} --steps 2 --sampler.num-steps 2 "
    "--algorithm.forcing teacher --sampler.chunks.chunk-frames 1",
    "ode_init": f"--method ode_init {SHORT} {VIDEO} {PARTS} --steps 2 --validate-every 0",
    "consistency": f"--method consistency {SHORT} {CLIPS} --steps 2",
    "dmd2": f"--method dmd2 {SHORT} {VIDEO} {PARTS} --steps 3 --validate-every 0 --algorithm.student-every 2",
    "dmd2_data_gan": f"--method dmd2 {SHORT} {CLIPS} --steps 3 --algorithm.student-every 2 --algorithm.rollout data "
    "--algorithm.gan-weight 3e-3",
    "dmd2_sid": f"--method dmd2 {SHORT} {VIDEO} {PARTS} --steps 3 --validate-every 0 --algorithm.student-every 2 "
    "--algorithm.direction sid",
    "dmd2_decoupled": f"--method dmd2 {SHORT} {VIDEO} {PARTS} --steps 3 --validate-every 0 "
    "--algorithm.student-every 2 --algorithm.direction decoupled",
    "self_forcing": f"--method self_forcing {SHORT} {VIDEO} {PARTS} --video.frames 13 --steps 3 --validate-every 0 "
    "--algorithm.student-every 2 --algorithm.gradient-frames 2",
    "long_self_forcing": f"--method long_self_forcing {SHORT} {VIDEO} {PARTS} --video.frames 13 --steps 3 "
    "--validate-every 0 --algorithm.student-every 2 --algorithm.teacher-frames 2",
    "streaming_tuning": f"--method streaming_tuning {SHORT} {VIDEO} {PARTS} --video.frames 13 --steps 3 "
    "--validate-every 0 --algorithm.student-every 2 --algorithm.teacher-frames 2 --algorithm.prompt-switch 1",
    "dance_grpo": f"--method dance_grpo {SHORT} {VIDEO} {GROUPS} --steps 2 --validate-every 2 --sampler.num-steps 4",
    "dance_grpo_kl_window_guard": f"--method dance_grpo {SHORT} {VIDEO} {GROUPS} --steps 2 --validate-every 0 "
    "--sampler.num-steps 4 --algorithm.kl-coefficient 0.1 --algorithm.kl-target 0.01 --algorithm.guard "
    "--algorithm.clip-velocity 0.1 --algorithm.window.size 2 "
    "--algorithm.dynamic-sampling-rounds 1 --algorithm.failure-below 3 --sampler.guidance-scale 3",
    "dance_ppo": f"--method dance_ppo {SHORT} {VIDEO} {SINGLES} --steps 3 --validate-every 0 --sampler.num-steps 4 "
    "--algorithm.gae-lambda 0.9 --algorithm.value-warmup-steps 1 --sampler.guidance-scale 3",
    "diffusion_nft": f"--method diffusion_nft {SHORT} {VIDEO} {GROUPS} --steps 2 --validate-every 0 "
    "--sampler.num-steps 3 --algorithm.kl-coefficient 0.1",
    "awm": f"--method awm {SHORT} {VIDEO} {GROUPS} --steps 2 --validate-every 0 --sampler.num-steps 3 "
    "--algorithm.noise-range 0.1 0.95",
    "crd": f"--method crd {SHORT} {VIDEO} {GROUPS} --steps 2 --validate-every 0 --sampler.num-steps 3 "
    "--algorithm.kl-coefficient 0.1 --algorithm.kl-guidance-scale 2",
    "online_dpo": f"--method online_dpo {SHORT} {VIDEO} {GROUPS} --steps 2 --validate-every 0 --sampler.num-steps 3",
    "flow_dpo": f"--method flow_dpo {SHORT} {CLIPS} --steps 2",
    "rcm": f"--method rcm {SHORT} {CLIPS} --steps 2 --algorithm.student-every 2",
    "flow_map": f"--method flow_map {SHORT} {CLIPS} --steps 2",
    "distill_rl": f"--method distill_rl {SHORT} {VIDEO} {GROUPS} --steps 2 --validate-every 0 --sampler.num-steps 3 "
    "--algorithm.tilt.beta 2 --algorithm.reward-gradient.weight 0.1 --algorithm.critic-updates 2",
    "reward_gradient": f"--method reward_gradient {SHORT} {VIDEO} {PARTS} --steps 2 --validate-every 0",
}


def metrics_of(flags: list[str], output: Path) -> list[dict[str, float]]:
    """Run the program on one thread and return its metrics, without those that depend on the machine."""
    torch.set_num_threads(1)
    if code := program([*flags, "--output", str(output)]):
        raise SystemExit(f"{' '.join(flags)}: exit code {code}")
    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{key: value for key, value in json.loads(line).items() if not MACHINE.search(key)} for line in lines]


def main(names: list[str]) -> None:
    held = json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names or RUNS:
            flags = RUNS[name].split()
            held[name] = {"flags": flags, "metrics": metrics_of(flags, Path(folder) / name)}
    FILE.write_text(json.dumps({name: held[name] for name in RUNS}, indent=1) + "\n", encoding="utf-8")
    Console().print(f"{FILE}: {len(RUNS)} runs", highlight=False)


if __name__ == "__main__":
    main(sys.argv[1:])
