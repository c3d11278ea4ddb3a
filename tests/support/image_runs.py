"""Settings of runs of two training steps of a student with condition images, on random networks of real classes."""

SINGLE = {"algorithm.batch-size": 2, "algorithm.micro-batch": 1}
SIZE = {"recipe": "tiny", "sampler.num-steps": 3, "steps": 2, "validate-every": 0, "checkpoint-every": 1}
SIZE |= {"student.learning-rate": 1e-3, "student.warmup-updates": 0, "student.adapter.rank": 2}
OWN = {  # of a method of each kind
    "dmd2": SINGLE | {"algorithm.student-every": 1, "critic.adapter.rank": 2},
    "dance_grpo": {"reward.frames": "all", "sampler.guidance_scale": 3.0}
    | {f"algorithm.{name}": 2 for name in ("num-prompts", "num-samples", "prompts-per-update", "rollout-batch")}
    | {"algorithm.update-batch": 2},
    "finetune": SINGLE,
}
