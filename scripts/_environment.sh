# Functions for the scripts that make a virtual environment in the checkout. Sets ROOT, the checkout.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

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
    if [ -L "$VIRTUAL_ENV" ]; then
        _say "$VIRTUAL_ENV is a link to an environment of another checkout: remove it to have one made here"
        return 1
    fi
    _say "making $(basename "$VIRTUAL_ENV") with Python $version"
    "$python" -m venv --clear "$VIRTUAL_ENV"
}

_pip() { "$VIRTUAL_ENV/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }

# Fills the environment by the function `_install`, unless that was done with the same FILES, and puts it first in PATH.
# Processes that come at once wait for the first; with nothing to do it takes a moment.
_use_environment() { # NAME FILES...
    VIRTUAL_ENV=$ROOT/$1
    shift
    if [ "$(uname -s)" != Linux ]; then
        _say "runs on Linux only"
        return 1
    fi
    (
        flock -n 9 || { _say "waiting for another process that fills $VIRTUAL_ENV" && flock 9; }
        _bring_up_to_date "$@"
    ) 9>"$VIRTUAL_ENV.lock" || return
    export VIRTUAL_ENV PATH="$VIRTUAL_ENV/bin:$PATH"
}

_bring_up_to_date() { # FILES...
    local stamp
    stamp=$(cat "$ROOT/scripts/_environment.sh" "$@" | sha256sum)
    # The first test fails in a checkout that was moved, the second after an upgrade of Python or half an installation.
    if ! grep -qsF " $VIRTUAL_ENV" "$VIRTUAL_ENV/pyvenv.cfg" || ! _pip --version >/dev/null 2>&1; then
        _create || return
    fi
    [ "$stamp" = "$(cat "$VIRTUAL_ENV/stamp" 2>/dev/null)" ] && return
    _install || return
    echo "$stamp" >"$VIRTUAL_ENV/stamp"
}
