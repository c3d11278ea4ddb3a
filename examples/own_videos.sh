#!/usr/bin/env bash
# From a folder of videos to a fast student of their style: fine-tune, distil into four steps, improve by a reward, export:
#   MODEL=Wan2.1-T2V-1.3B-Diffusers RECIPE=wan2.1-1.3b VIDEOS=clips REWARD=hpsv3 RANKS=8 examples/own_videos.sh
# VIDEOS is a folder with x.txt beside x.mp4, or what `preprocess` wrote of it. Its captions are also the prompts of the other
# two trainings. Without these files the tiny world is trained. Flags go to the three trainings.
set -euo pipefail
RUNS=${RUNS:-runs} # folder for everything that is written
RECIPE=${RECIPE:-tiny}
train=(torchrun --standalone --shutdown-timeout 900 --nproc-per-node "${RANKS:-1}" -m unified_trainer --recipe "$RECIPE")

"${train[@]}" --method finetune --output "$RUNS/sft" ${MODEL:+--student.path "$MODEL"} ${VIDEOS:+--data.path "$VIDEOS"} "$@"
# The student, its teacher and its critic all start from the fine-tuned model.
python -m unified_trainer export "$RUNS/sft" "$RUNS/sft-model"
"${train[@]}" --method dmd2 --output "$RUNS/sft-dmd2" --student.path "$RUNS/sft-model" \
    ${VIDEOS:+--prompts "$VIDEOS"} ${REWARD:+--reward.path "$REWARD"} "$@"
"${train[@]}" --method dance_grpo --output "$RUNS/sft-rl" --init-from "$RUNS/sft-dmd2" --student.path "$RUNS/sft-model" \
    ${VIDEOS:+--prompts "$VIDEOS"} ${REWARD:+--reward.path "$REWARD"} "$@"
python -m unified_trainer export "$RUNS/sft-rl" "$RUNS/sft-student"
python -m unified_trainer sample "$RUNS/sft-rl" --prompts "${VIDEOS:-a red circle moving left}" --output "$RUNS/sft-videos"
