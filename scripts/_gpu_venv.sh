# Sourced by the other scripts. Makes the checkout's .venv-gpu, or brings it up to date, and puts it first in PATH: the
# CUDA build of PyTorch on a GPU that is simulated (tests/simulated_gpu). Sets ROOT, the checkout, and PYTHONPATH.
. "$(dirname "${BASH_SOURCE[0]}")/_environment.sh"

# By name, because the dependencies that the CUDA build declares are gigabytes of NVIDIA's libraries.
_NEEDED_BY_TORCH=(filelock typing-extensions 'setuptools>=77' sympy networkx jinja2 fsspec numpy)
_NEEDED_BY_TESTS=(pyzmq msgpack psutil xxhash rich typer pytest pytest-timeout hypothesis safetensors matplotlib obstore)
_CUDA_HEADERS=(nvidia-cuda-runtime==13.5.37 nvidia-cuda-crt==13.5.37 nvidia-cuda-cccl==13.3.5.0.6)

_install() {
    # With three `=`: two would also take a build without CUDA that PIP_FIND_LINKS or an index offers ("2.13.0+cpu").
    _say "installing the CUDA build of PyTorch, unless it is there (530 MB)"
    _pip install -qq --no-deps torch===2.13.0 "${_CUDA_HEADERS[@]}" || return
    _say "installing what the tests need"
    # pip misses, and says so, what torch declares.
    _pip install -qq "${_NEEDED_BY_TORCH[@]}" "${_NEEDED_BY_TESTS[@]}" 2>&1 |
        grep -vE "^ERROR: pip's dependency resolver|^torch .* requires .*, (which is not installed|but you have)" >&2
    return "${PIPESTATUS[0]}"
}

_find_compiler() {
    command -v "${CXX:-g++}" >/dev/null && return
    if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
        _say "installing g++"
        local install=(env DEBIAN_FRONTEND=noninteractive timeout 300)
        install+=(apt-get install -y -qq --no-install-recommends g++ libc6-dev)
        "${install[@]}" >/dev/null 2>&1 </dev/null ||
            { timeout 120 apt-get update -qq && "${install[@]}"; } >/dev/null 2>&1 </dev/null
        command -v "${CXX:-g++}" >/dev/null && return
    fi
    _say "the simulated GPU needs a C++ compiler; on Debian or Ubuntu: apt-get install g++"
    return 1
}

_build() {
    (
        flock 9
        python "$ROOT/tests/simulated_gpu/build.py"
    ) 9>"$VIRTUAL_ENV.lock"
}

_find_compiler || exit
_use_environment .venv-gpu "$ROOT/scripts/_gpu_venv.sh" || exit
_build || exit
export PYTHONPATH="$ROOT:$ROOT/tests${PYTHONPATH:+:$PYTHONPATH}"
