#!/usr/bin/env bash
# Several nodes with Ray: start this on every node with the same words, by hand or with srun; node 0 runs the program.
#   HEAD=first NODE=1 RAY_AUTH_TOKEN=... examples/ray.sh --method dance_grpo --rollouts.workers 16 --rollouts.ahead 1 ...
set -euo pipefail
HEAD=${HEAD:?set it to the host name of the first node}
NODE=${NODE:-${SLURM_NODEID:-0}} # 0 is the first node
PORT=${PORT:-6379}
# Whoever knows the token can run code on all nodes: make one with `openssl rand -hex 32`, and keep it.
export RAY_USAGE_STATS_ENABLED=0 RAY_AUTH_MODE=token RAY_AUTH_TOKEN=${RAY_AUTH_TOKEN:?set it to a secret of 64 hexadecimal digits}

reachable() { (: > "/dev/tcp/$HEAD/$PORT") 2> /dev/null; }

if [ "$NODE" -gt 0 ]; then
    until reachable; do sleep 1; done
    exec ray start --address "$HEAD:$PORT" --block ${RAY_OPTIONS:-} # ends about a minute after the first node
fi
ray start --head --port "$PORT" --include-dashboard false --block ${RAY_OPTIONS:-} &
trap 'kill %1; wait' EXIT
until reachable; do sleep 1; done
python -m unified_trainer --launcher ray --ray.address "$HEAD:$PORT" "$@"
