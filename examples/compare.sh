#!/usr/bin/env bash
# Compare two checkpoints on the same prompts and noise: examples/compare.sh runs/dmd2:ema runs/dmd2-rl prompts.txt
# It prints each measure of both and the differences, with intervals over the prompts; runs/compare holds pages with the
# videos side by side, evaluation.html, and without names to vote on, votes.html.
set -euo pipefail
RUNS=${RUNS:-runs}       # folder for everything that is written
SAMPLES=${SAMPLES:-4}    # samples of each prompt
FIRST=$1 SECOND=$2 PROMPTS=$3

python -m unified_trainer evaluate "$FIRST" "$SECOND" --prompts "$PROMPTS" --samples "$SAMPLES" \
    --output "$RUNS/compare"
