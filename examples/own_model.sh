#!/usr/bin/env bash
# Reinforcement learning of your own model with your own prompts, then a folder that WanPipeline loads:
#   MODEL=Wan2.1-T2V-1.3B-Diffusers RECIPE=wan2.1-1.3b REWARD=hpsv3 PROMPTS=prompts.txt RANKS=8 examples/own_model.sh
# MODEL is a diffusers pipeline folder, REWARD what `import-hpsv3` wrote, PROMPTS a file with one prompt per line.
# Without any of them the tiny world is trained. Flags go to the training.
set -euo pipefail
RUNS=${RUNS:-runs} # folder for everything that is written
RANKS=${RANKS:-1}  # processes, one per GPU

torchrun --standalone --nproc-per-node "$RANKS" -m unified_trainer --method dance_grpo --output "$RUNS/rl" \
    ${RECIPE:+--recipe "$RECIPE"} ${MODEL:+--student.path "$MODEL"} ${REWARD:+--reward.path "$REWARD"} \
    ${PROMPTS:+--prompts "$PROMPTS"} "$@"
python -m unified_trainer export "$RUNS/rl" "$RUNS/rl-student"
