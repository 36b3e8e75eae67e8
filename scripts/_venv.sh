# Sourced by the other scripts. Makes the checkout's .venv, or brings it up to date, and puts it first in PATH.
# Sets ROOT, the checkout.
. "$(dirname "${BASH_SOURCE[0]}")/_environment.sh"

_install() {
    # First and by its exact version, so that a build without CUDA, offered by PIP_FIND_LINKS or an index, is taken.
    _say "installing PyTorch, unless it is there (can take minutes)"
    if ! _pip install -qq torch==2.13.0; then
        _say "no PyTorch 2.13.0 to be had, taking another"
        _pip install -qq 'torch>=2.8' || return
    fi
    _say "installing sidesave and what its tests need"
    _pip install -qq -e "$ROOT[test,cli]"
}

_use_environment .venv "$ROOT/pyproject.toml" "$ROOT/scripts/_venv.sh" || exit
