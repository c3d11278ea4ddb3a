#!/usr/bin/env bash
# Several nodes under Slurm, one launcher per node: sbatch --nodes 4 examples/slurm.sh --method dmd2 --recipe ...
#SBATCH --job-name unified-trainer
#SBATCH --ntasks-per-node 1
#SBATCH --gpus-per-node 8
#SBATCH --cpus-per-task 64
#SBATCH --signal TERM@900
set -euo pipefail
GPUS=${GPUS:-8} # processes on each node
PORT=${PORT:-29500}
HOSTS=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
HOST=${HOSTS%%$'\n'*} # the first line

# --signal TERM@900: fifteen minutes before the time limit every rank finishes its step and saves; --resume continues. The
# time must be longer than a training step with its checkpoint, and torchrun must wait as long before it kills its ranks.
# --cpus-per-task 64: eight cores for each GPU. Without it Slurm may give a task one core, which all ranks and their loaders
# share. srun does not inherit it from sbatch. For four GPUs: GPUS=4 sbatch --gpus-per-node 4 --cpus-per-task 32 ...
srun --cpus-per-task "$SLURM_CPUS_PER_TASK" torchrun --shutdown-timeout 900 \
    --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$GPUS" \
    --rdzv-backend c10d --rdzv-endpoint "$HOST:$PORT" --rdzv-id "$SLURM_JOB_ID" \
    -m unified_trainer "$@"
