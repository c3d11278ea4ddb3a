#!/usr/bin/env bash
# Train the embedded tiny world by reinforcement learning and look at videos of it: no GPU, no download.
# Flags of this script go to the training: examples/try.sh --steps 20
set -euo pipefail
RUNS=${RUNS:-runs} # folder for everything that is written
RANKS=${RANKS:-1}  # processes, one per GPU

torchrun --standalone --shutdown-timeout 900 --nproc-per-node "$RANKS" -m unified_trainer --method dance_grpo --output "$RUNS/try" "$@"
python -m unified_trainer sample "$RUNS/try:ema" --prompts "a red circle moving left" --output "$RUNS/try-videos"
