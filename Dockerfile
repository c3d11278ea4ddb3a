# An image for NVIDIA GPUs; torch brings the CUDA libraries, the host only the driver (NVIDIA Container Toolkit).
#   docker build -t unified-trainer .
#   docker run --gpus all -v "$PWD:/work" unified-trainer --method dance_grpo
#   docker run --gpus all --shm-size 16g -v "$PWD:/work" --entrypoint torchrun unified-trainer \
#       --shutdown-timeout 900 --nproc-per-node 8 -m unified_trainer --method dance_grpo
FROM python:3.12-slim
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility PIP_NO_CACHE_DIR=1
# The compiler is for torch.compile.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc g++ && rm -rf /var/lib/apt/lists/*
RUN pip install torch==2.13.0
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY unified_trainer unified_trainer
RUN pip install '.[wandb,tensorboard]' && pip install --no-deps hpsv3==1.0.0
WORKDIR /work
ENTRYPOINT ["unified-trainer"]
