#!/usr/bin/env bash
# Distil a model into a student of few steps, then improve the student by reinforcement learning:
#   MODEL=Wan2.1-T2V-1.3B-Diffusers RECIPE=wan2.1-1.3b REWARD=hpsv3 PROMPTS=prompts.txt RANKS=8 examples/distill_then_rl.sh
# MODEL is a diffusers pipeline folder, REWARD what `import-hpsv3` wrote or a function of yours,
# my_reward.py:score, and PROMPTS a file with one prompt per line.
# Without any of them the tiny world is trained. Flags go to both trainings.
set -euo pipefail
RUNS=${RUNS:-runs} # folder for everything that is written
RANKS=${RANKS:-1}  # processes, one per GPU

reward=()
case "${REWARD:-}" in
*.py:*) reward=(--reward.kind "$REWARD" --reward.path "") ;;
?*) reward=(--reward.path "$REWARD") ;;
esac

train() {
    torchrun --standalone --shutdown-timeout 900 --nproc-per-node "$RANKS" -m unified_trainer ${RECIPE:+--recipe "$RECIPE"} \
        ${MODEL:+--student.path "$MODEL"} ${PROMPTS:+--prompts "$PROMPTS"} "${reward[@]}" "$@"
}
train --method dmd2 --output "$RUNS/dmd2" "$@"
train --method dance_grpo --init-from "$RUNS/dmd2:ema" --output "$RUNS/dmd2-rl" "$@"
python -m unified_trainer export "$RUNS/dmd2-rl" "$RUNS/dmd2-rl-student"
