#!/bin/sh
# install_torch.sh PYTHON VERSION: the CPU build of torch on a machine without a GPU, else the default build.
set -eu
python=$1
version=$2
if command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then
    "$python" -m pip install --quiet "torch==$version"
    exit
fi
# A CPU wheel that pip already knows of; otherwise uv, which knows where the CPU builds are; at last PyPI's, with CUDA.
"$python" -m pip install --quiet "torch==$version+cpu" 2>/dev/null && exit
"$python" -m pip install --quiet uv
"$python" -m uv pip install --python "$python" --torch-backend cpu "torch==$version" && exit
"$python" -m pip install --quiet "torch==$version"
