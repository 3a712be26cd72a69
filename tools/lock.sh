#!/usr/bin/env bash
# lock.sh BIN: resolve requirements/*.txt from pyproject.toml, for every supported Python and platform at once.
set -euo pipefail

bin=$1
options=(--universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links --no-annotate
    --custom-compile-command "make lock")
compile() { "$bin/python" -m uv pip compile --quiet "${options[@]}" "$@"; }

"$bin/python" -m uv --version >/dev/null 2>&1 || "$bin/python" -m pip install --quiet uv
compile pyproject.toml requirements/build.in -o requirements/runtime.txt
compile pyproject.toml requirements/build.in --extra dev -c requirements/runtime.txt -o requirements/dev.txt
compile pyproject.toml requirements/build.in --extra dev --extra docs -c requirements/dev.txt -o requirements/docs.txt
compile pyproject.toml requirements/build.in --extra dev --extra fuzz -c requirements/dev.txt -o requirements/fuzz.txt

if grep -nE '://|--(extra-)?index' requirements/*.txt; then
    echo "lock: an address got into a lock file" >&2
    exit 1
fi
