# Sourced by the other scripts. Makes the checkout's .venv, or brings it up to date, and puts it first in PATH.
# Sets ROOT, the checkout. Processes that come at once wait for the first; with nothing to do it takes a moment.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VIRTUAL_ENV=$ROOT/.venv

_say() { echo "sidesave: $*" >&2; }

_find_python() {
    local name
    for name in python3 python3.13 python3.12 python3.11; do
        "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$name" && return
    done
    _say "found no Python 3.11 or newer (tried python3, python3.13, python3.12, python3.11)"
    return 1
}

_create() {
    local python version
    python=$(_find_python) || return
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        _say "$python cannot make virtual environments; on Debian or Ubuntu: apt-get install python$version-venv"
        return 1
    fi
    _say "making .venv with Python $version"
    "$python" -m venv --clear "$VIRTUAL_ENV"
}

_pip() { "$VIRTUAL_ENV/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }

_set_up() {
    local stamp
    stamp=$(cat "$ROOT/pyproject.toml" "$ROOT/setup.py" "$ROOT/scripts/_venv.sh" | sha256sum)
    # The first test fails in a checkout that was moved, the second after an upgrade of Python or half an installation.
    if ! grep -qsF " $VIRTUAL_ENV" "$VIRTUAL_ENV/pyvenv.cfg" || ! _pip --version >/dev/null 2>&1; then
        _create || return
    fi
    [ "$stamp" = "$(cat "$VIRTUAL_ENV/stamp" 2>/dev/null)" ] && return
    # First and by its exact version, so that a build without CUDA, offered by PIP_FIND_LINKS or an index, is taken.
    _say "installing PyTorch, unless it is there (can take minutes)"
    if ! _pip install -qq torch==2.13.0; then
        _say "no PyTorch 2.13.0 to be had, taking another"
        _pip install -qq 'torch>=2.8' || return
    fi
    _say "installing sidesave and what its tests need"
    _pip install -qq -e "$ROOT[test,cli]" || return
    echo "$stamp" >"$VIRTUAL_ENV/stamp"
}

if [ "$(uname -s)" != Linux ]; then
    _say "runs on Linux only"
    exit 1
fi
(
    flock -n 9 || { _say "waiting for another process that fills .venv" && flock 9; }
    _set_up
) 9>"$ROOT/.venv.lock" || exit
export VIRTUAL_ENV PATH="$VIRTUAL_ENV/bin:$PATH"
