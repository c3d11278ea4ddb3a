#!/usr/bin/env bash
# Train a causal student that generates chunk by chunk, and stream a video longer than those it was trained on:
#   MODEL=Wan2.1-T2V-1.3B-Diffusers RECIPE=wan2.1-1.3b CHUNK=3 FRAMES=241 PROMPTS=prompts.txt RANKS=8 \
#       SCENES="a cat walks | a cat sleeps" examples/streaming.sh
# MODEL is a diffusers pipeline folder, PROMPTS a file with one prompt per line. Without any of them the tiny world is
# trained. Flags go to both trainings. With CLIPS, a folder of clips with captions, the second is CausVid's: dmd2 on noised
# clips in place of self_forcing (arXiv:2412.07772; RECIPE=examples/causvid.yaml has its published settings).
set -euo pipefail
CHUNK=${CHUNK:-1}    # latent frames of a chunk, as the recipe's self_forcing has them
FRAMES=${FRAMES:-49} # frames of the streamed video
SCENES=${SCENES:-a red circle moving left | a red circle moving right}
RUNS=${RUNS:-runs} # folder for everything that is written
RANKS=${RANKS:-1}  # processes, one per GPU

train() {
    torchrun --standalone --shutdown-timeout 900 --nproc-per-node "$RANKS" -m unified_trainer ${RECIPE:+--recipe "$RECIPE"} \
        ${MODEL:+--student.path "$MODEL"} ${PROMPTS:+--prompts "$PROMPTS"} --sampler.chunks.chunk-frames "$CHUNK" "$@"
}
train --method ode_init --output "$RUNS/ode-init" "$@"
SECOND=(--method self_forcing)
if [ "${CLIPS:-}" ]; then SECOND=(--method dmd2 --algorithm.rollout data --data.path "$CLIPS"); fi
train "${SECOND[@]}" --init-from "$RUNS/ode-init:ema" --output "$RUNS/student" "$@"
python -m unified_trainer sample "$RUNS/student:ema" --stream --frames "$FRAMES" --prompts "$SCENES" \
    --output "$RUNS/streamed"
