"""Runs of the program on the simulated NPU, in a process of their own: `python simulated_runs.py FOLDER`.

Writes, as JSON, what each run's last training step let the program wait for, by phase, and its operations in float64;
and what `simulated_phases` counts.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import simulated_npu
import simulated_phases
from helpers import OF_CLIPS, OF_SAMPLES, small_pipeline

from unified_trainer.__main__ import main
from unified_trainer.run.trainer import Trainer

VIDEO = {"video.frames": 5, "video.height": 32, "video.width": 32}
CLIPS = {"data.num-clips": 2, "algorithm.batch-size": 2, "algorithm.micro-batch": 1}
PARTS = VIDEO | {"algorithm.batch-size": 2, "algorithm.micro-batch": 1}
GROUPS = VIDEO | {"algorithm.num-prompts": 2, "algorithm.num-samples": 2, "algorithm.prompts-per-update": 1}
GROUPS |= {"algorithm.rollout-batch": 2, "algorithm.update-batch": 1}
SINGLES = GROUPS | {"algorithm.num-prompts": 4, "algorithm.num-samples": 1, "algorithm.prompts-per-update": 2}
ON_CPU = {"algorithm.trajectories": "cpu", "algorithm.rollout-batch": 1}
RUNS = {
    "dance_grpo": GROUPS | {"sampler.num-steps": 3, "algorithm.kl-coefficient": 0.1},
    "dmd2": PARTS | {"algorithm.student-every": 1, "sampler.num-steps": 2},
    "self_forcing": PARTS | {"video.frames": 9, "algorithm.student-every": 1, "sampler.num-steps": 2},
    "long_self_forcing": PARTS | {"video.frames": 13, "algorithm.teacher-frames": 2, "sampler.num-steps": 2},
    "streaming_tuning": PARTS | {"video.frames": 13, "algorithm.teacher-frames": 2, "sampler.num-steps": 2},
    "ode_init": PARTS | {"sampler.num-steps": 2, "algorithm.teacher-steps": 3},
    "dance_ppo": SINGLES | {"sampler.num-steps": 3} | ON_CPU,
    "reward_gradient": PARTS | {"sampler.num-steps": 2},
}
RUNS |= dict.fromkeys(OF_CLIPS, CLIPS)
RUNS |= {name: GROUPS | {"sampler.num-steps": 2} | ON_CPU for name in OF_SAMPLES if name not in RUNS}
SCORED = {"reward.kind": "sharpness", "reward.path": ""}  # a scorer in plain torch; its value does not matter here
# dance_grpo compares its first update of a run with the rollout, which reads from the device.
STEPS = {"dance_grpo": 2}  # others take one
ALWAYS = SCORED | {"recipe": "tiny", "device": "npu", "validate-every": 0, "checkpoint-every": 0}


def counted(step):
    """Count only what a training step does, in the last one."""

    def run(self, number: int) -> dict[str, float]:
        simulated_npu.waits.clear()
        simulated_npu.float64.clear()
        metrics = step(self, number)
        found.update(
            waits=[[*key, count] for key, count in simulated_npu.waits.items()],
            float64=[[*key, count] for key, count in simulated_npu.float64.items()],
        )
        return metrics

    return run


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    network = small_pipeline(folder / "wan")
    simulated_npu.install()
    Trainer.step = counted(Trainer.step)
    results = {}
    for method in sys.argv[2:] or RUNS:
        found: dict[str, list] = {}
        settings = RUNS[method] | ALWAYS | {"student.path": network, "steps": STEPS.get(method, 1)}
        words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        code = main(["--method", method, *words, "--output", str(folder / method)])
        resumed = main(["--resume", str(folder / method), "--steps", "2"]) if method == "dmd2" and not code else 0
        results[method] = {"code": code, "resumed": resumed, **found}
    (folder / "found.json").write_text(json.dumps(results), encoding="utf-8")
    if not sys.argv[2:]:
        (folder / "phases.json").write_text(json.dumps(simulated_phases.phases()), encoding="utf-8")
        (folder / "offloaded.json").write_text(json.dumps(simulated_phases.offloaded(folder)), encoding="utf-8")
        (folder / "prepared.json").write_text(json.dumps(simulated_phases.prepared()), encoding="utf-8")
