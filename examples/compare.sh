#!/usr/bin/env bash
# Compare two checkpoints on the same prompts and noise: examples/compare.sh runs/dmd2:ema runs/dmd2-rl@40 prompts.txt
# It prints the mean reward of each; runs/compare/{first,second} hold their videos, and scores in scores/run.jsonl.
set -euo pipefail
RUNS=${RUNS:-runs}       # folder for everything that is written
SAMPLES=${SAMPLES:-4}    # samples of each prompt
FIRST=$1 SECOND=$2 PROMPTS=$3

python -m unified_trainer rollout "$FIRST" --prompts "$PROMPTS" --num-samples "$SAMPLES" --num-videos 4 \
    --output "$RUNS/compare/first"
python -m unified_trainer rollout "$SECOND" --prompts "$PROMPTS" --num-samples "$SAMPLES" --num-videos 4 \
    --output "$RUNS/compare/second"
