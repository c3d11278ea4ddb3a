#!/usr/bin/env bash
# Distil a model into a student of few steps, then improve the student by reinforcement learning:
#   MODEL=Wan2.1-T2V-1.3B-Diffusers RECIPE=wan2.1-1.3b REWARD=hpsv3 PROMPTS=prompts.txt RANKS=8 examples/distill_then_rl.sh
# Without these, the tiny world stands in. Flags go to both trainings.
set -euo pipefail
MODEL=${MODEL:-tiny}     # diffusers pipeline folder
RECIPE=${RECIPE:-tiny}   # name of a recipe
REWARD=${REWARD:-tiny}   # folder of HPSv3
PROMPTS=${PROMPTS:-tiny} # file with one prompt per line
RUNS=${RUNS:-runs}       # folder for everything that is written
RANKS=${RANKS:-1}        # processes, one per GPU

train() {
    torchrun --standalone --nproc-per-node "$RANKS" -m unified_trainer --recipe "$RECIPE" --student.path "$MODEL" \
        --reward.path "$REWARD" --prompts "$PROMPTS" "$@"
}
train --method dmd2 --output "$RUNS/dmd2" "$@"
train --method dance_grpo --init-from "$RUNS/dmd2:ema" --output "$RUNS/dmd2-rl" "$@"
python -m unified_trainer export "$RUNS/dmd2-rl" "$RUNS/dmd2-rl-student"
