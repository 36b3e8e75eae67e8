#!/usr/bin/env bash
# The tests and the benchmarks that need a GPU, straight from the checkout: nothing is installed.
#   PYTHON=... scripts/gpu_check.sh      takes another interpreter than python3
set -uo pipefail
cd "$(dirname "$0")/.." || exit
PYTHON=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

"$PYTHON" - <<'EOF' || exit
import importlib.util
import sys

NEEDED = {
    "torch": "torch",
    "zmq": "pyzmq",
    "msgpack": "msgpack",
    "psutil": "psutil",
    "xxhash": "xxhash",
    "numpy": "numpy",
    "safetensors": "safetensors",
    "pytest": "pytest",
    "pytest_timeout": "pytest-timeout",
    "hypothesis": "hypothesis",
}
missing = [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]
if missing:
    sys.exit(f"{sys.executable} lacks: {' '.join(missing)}")
import torch

if not torch.cuda.is_available():
    sys.exit(f"torch {torch.__version__} sees no CUDA device")
print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, {torch.cuda.get_device_name()}", flush=True)
EOF

# Tests mostly wait for processes. More than twelve at once would want more of the device than some have.
workers=()
if "$PYTHON" -c 'import xdist' 2>/dev/null; then
    cores=$(nproc)
    workers=(-n "$((cores > 12 ? 12 : cores))")
fi
status=0
run() {
    "$@" || { rc=$?; [ "$status" -ne 0 ] || status=$rc; }
}

mapfile -t tests < <(grep -rlE 'mark\.gpu|gpu\.MARKS' tests --include='test_*.py')
run "$PYTHON" -m pytest -m gpu -q "${workers[@]}" "${tests[@]}"
run "$PYTHON" -m scripts.bench.gpu
run "$PYTHON" -m scripts.bench.training_loop --device cuda
exit "$status"
