"""A training loop of your own: DMD2 from Python, with early stopping by a reward that the method does not train on.

python examples/own_loop.py [RUN_DIRECTORY]; on two ranks:
torchrun --shutdown-timeout 900 --nproc-per-node 2 examples/own_loop.py
"""

import sys

import unified_trainer as ut

PROMPTS = ["a red circle moving left", "a blue square moving up"]
MOST, EVERY = 20, 5  # training steps, and steps between measurements
folder = sys.argv[1] if len(sys.argv) > 1 else "runs/own-loop"

settings = ut.configure(
    recipe="tiny",
    method="dmd2",
    settings={
        "output": folder,
        "algorithm.batch_size": 8,
        "student": {"ema_decay": 0.9},
        "reward": {"path": "tiny", "frames": "first"},  # measured only: dmd2 learns from its teacher
    },
)

best = float("-inf")
with ut.Run(settings) as run:
    while run.steps_done < MOST:
        metrics = run.step()
        if run.steps_done % EVERY:
            continue
        videos = run.sample(PROMPTS, seed=1)  # [2, 3, frames, height, width] in [0, 1]
        reward = float(run.score(videos, PROMPTS)["reward"].mean())
        if run.is_main:
            print(f"step {run.steps_done}: reward {reward:.3f}, gradient norm {metrics['critic/grad_norm']:.3f}")
        if reward <= best:
            break
        best = reward
        run.save()  # python -m unified_trainer --resume continues from here as well

if run.is_main:
    student = ut.Student.load(f"{folder}:ema")
    print(f"{folder}: videos {tuple(student.sample(PROMPTS, seed=1).shape)} of its last checkpoint")
