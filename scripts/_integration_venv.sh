# Sourced by scripts/test. Functions for the environments of the frameworks that have an adapter in sidesave.integrations,
# one each. Sets ROOT, the checkout.
. "$(dirname "${BASH_SOURCE[0]}")/_environment.sh"

_CONSTRAINTS=$ROOT/tests/client/integrations/constraints
_NEEDED_BY_TESTS=(pytest pytest-timeout hypothesis)

known_integrations() {
    local file
    for file in "$_CONSTRAINTS"/*.txt; do
        basename "$file" .txt
    done
}

# Makes the checkout's .venv-NAME, or brings it up to date, and puts it first in PATH.
use_integration() { # NAME
    local _name=$1
    if [ ! -e "$_CONSTRAINTS/$_name.txt" ]; then
        _say "no framework $_name: there are $(known_integrations | paste -sd ' ')"
        return 2
    fi
    _install() {
        local wanted=(-e "$ROOT[$_name]")
        # One without an adapter has no extra: all that its file names is installed.
        grep -q "^$_name = \[" "$ROOT/pyproject.toml" || wanted=(-e "$ROOT" -r "$_CONSTRAINTS/$_name.txt")
        _say "installing $_name, unless it is there (can take minutes)"
        # First and by its exact version, so that a build without CUDA, offered by PIP_FIND_LINKS or an index, is taken.
        _pip install -qq -c "$_CONSTRAINTS/$_name.txt" "$(grep '^torch==' "$_CONSTRAINTS/$_name.txt")" &&
            _pip install -qq -c "$_CONSTRAINTS/$_name.txt" "${wanted[@]}" "${_NEEDED_BY_TESTS[@]}"
    }
    _use_environment ".venv-$_name" "$ROOT/pyproject.toml" "$ROOT/scripts/_integration_venv.sh" "$_CONSTRAINTS/$_name.txt"
}
