#!/usr/bin/env bash
# bootstrap.sh VENV LOCK: make VENV if it is not there, install exactly what LOCK pins, then this package, editable.
set -euo pipefail

venv=$1
lock=$2

say() { printf 'setup: %s\n' "$*" >&2; }

# The first interpreter that runs and is new enough. A version manager's stub may exist and yet not run.
find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11; do
        [ -n "$candidate" ] || continue
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            printf '%s' "$candidate"
            return
        fi
    done
    say "no Python 3.11 or newer found. On Debian 12: apt-get install python3 python3-venv"
    exit 2
}

# Debian keeps venv's ensurepip in a package of its own.
ensure_venv_module() {
    local python=$1
    if "$python" -c 'import venv, ensurepip' >/dev/null 2>&1; then
        return
    fi
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing python3-venv with apt-get"
        if ! { apt-get install -y -qq python3-venv || { apt-get update -qq && apt-get install -y -qq python3-venv; }; } \
            >/dev/null 2>&1; then
            say "that failed. Try: apt-get update && apt-get install -y python3-venv"
            exit 2
        fi
        "$python" -c 'import venv, ensurepip' >/dev/null 2>&1 && return
    fi
    say "$python cannot make virtual environments. On Debian: sudo apt-get install -y python3-venv"
    exit 2
}

if ! "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 \
    || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    python=$(find_python)
    ensure_venv_module "$python"
    say "making ${venv##*/} with $("$python" --version)"
    rm -rf "$venv"
    "$python" -m venv "$venv"
fi

# Pip says nothing when it is quiet, and too much when it is not: a line for every twenty packages, and all it said if it
# fails.
install_locked() {
    local log=$venv/setup.log
    "$venv/bin/python" -m pip install --progress-bar off --require-hashes -r "$lock" 2>&1 | tee "$log" | awk '
        /^(Collecting|Processing|Requirement already satisfied)/ && ++found % 20 == 0 { print "setup: " found " packages" }
        /^Installing collected packages/ { print "setup: unpacking " found " packages" }
        { fflush() }' >&2 || {
        cat "$log" >&2
        say "that failed; what pip said stands above and in $log"
        exit 1
    }
}

say "installing what ${lock} pins"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
install_locked
# No build isolation: the build tool is pinned in the lock like all else.
"$venv/bin/python" -m pip install --quiet --no-deps --no-build-isolation --editable .
