#!/usr/bin/env bash
# Reinforcement learning of your own model with your own prompts and reward, then a folder that WanPipeline loads, and
# videos of it:
#   MODEL=Wan2.1-T2V-1.3B-Diffusers RECIPE=wan2.1-1.3b REWARD=hpsv3 PROMPTS=prompts.txt RANKS=8 examples/own_model.sh
# MODEL is a diffusers pipeline folder or a hub id, LORA an adapter for it, REWARD what `import-hpsv3` wrote or a function
# of yours, my_reward.py:score, and PROMPTS a file with one prompt per line.
# Without any of them the tiny world is trained. Flags go to the training.
set -euo pipefail
RUNS=${RUNS:-runs} # folder for everything that is written
RANKS=${RANKS:-1}  # processes, one per GPU

reward=()
case "${REWARD:-}" in
*.py:*) reward=(--reward.kind "$REWARD" --reward.path "") ;;
?*) reward=(--reward.path "$REWARD") ;;
esac

torchrun --standalone --shutdown-timeout 900 --nproc-per-node "$RANKS" -m unified_trainer --method dance_grpo --output "$RUNS/rl" \
    ${RECIPE:+--recipe "$RECIPE"} ${MODEL:+--student.path "$MODEL"} ${LORA:+--student.adapter.path "$LORA"} \
    ${PROMPTS:+--prompts "$PROMPTS"} "${reward[@]}" "$@"
python -m unified_trainer export "$RUNS/rl" "$RUNS/rl-student"
python -m unified_trainer sample "$RUNS/rl" --prompts "${PROMPTS:-a red circle moving left}" --output "$RUNS/rl-videos"
