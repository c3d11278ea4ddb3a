#!/usr/bin/env bash
# Reinforcement learning of your own model with your own prompts, then a folder that WanPipeline loads:
#   MODEL=Wan2.1-T2V-1.3B-Diffusers RECIPE=wan2.1-1.3b REWARD=hpsv3 PROMPTS=prompts.txt RANKS=8 examples/own_model.sh
# REWARD is what `import-hpsv3` wrote. Without these, the tiny world stands in. Flags go to the training.
set -euo pipefail
MODEL=${MODEL:-tiny}     # diffusers pipeline folder
RECIPE=${RECIPE:-tiny}   # name of a recipe
REWARD=${REWARD:-tiny}   # folder of HPSv3
PROMPTS=${PROMPTS:-tiny} # file with one prompt per line
RUNS=${RUNS:-runs}       # folder for everything that is written
RANKS=${RANKS:-1}        # processes, one per GPU

torchrun --standalone --nproc-per-node "$RANKS" -m unified_trainer --method dance_grpo --recipe "$RECIPE" \
    --student.path "$MODEL" --reward.path "$REWARD" --prompts "$PROMPTS" --output "$RUNS/rl" "$@"
python -m unified_trainer export "$RUNS/rl" "$RUNS/rl-student"
