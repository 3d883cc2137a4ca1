#!/usr/bin/env bash
# Installs moe_exp and what it needs for training into an image that brings its own torch, and checks the result.
#
#   bash containers/install.sh              # into python3
#   PYTHON=/opt/conda/bin/python EXTRAS=train,data,wandb bash containers/install.sh
#
# Expected time: a few minutes, depending on the network. torch stays as it is: it was built for the image's CUDA.
set -euo pipefail
export PIP_CONSTRAINT="" # of NVIDIA's images: it pins other versions than setup.py
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." >/dev/null && pwd -P)"
python="${PYTHON:-python3}"
extras="${EXTRAS:-train,data}"

if ! torch="$("$python" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null)"; then
    echo "Error: $python has no torch. Fix: use an image that brings torch, or set PYTHON" >&2
    exit 1
fi
pip=("$python" -m pip install --no-cache-dir "torch==$torch")
"${pip[@]}" "setuptools>=77"
"${pip[@]}" --no-build-isolation "${root}[$extras]"
cd / # so that the installed package is checked, not the folder
"$python" -m moe_exp.commands.doctor --missing train || {
    echo "Error: $python lacks the packages above" >&2
    exit 1
}
echo "moe_exp is installed with torch $torch"
