#!/usr/bin/env bash
# Install A3R for development into .venv. Torch's CPU build is taken where no NVIDIA driver is present.
set -euo pipefail
cd "$(dirname "$0")/.."
backend=()
if [ -n "${PIP_FIND_LINKS:-}" ]; then
    export UV_FIND_LINKS="$PIP_FIND_LINKS"
elif ! command -v nvidia-smi >/dev/null 2>&1; then
    backend=(--torch-backend=cpu)
fi
.venv/bin/uv pip install -q --compile-bytecode --python .venv/bin/python "${backend[@]}" -c constraints.txt -e '.[dev]'
