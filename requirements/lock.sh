#!/bin/sh
# Writes the locks anew: requirements/lock.sh [further words for uv, such as --upgrade]
cd "$(dirname "$0")" || exit
uv=../.venv/bin/uv
for engine in cpu gpu; do
    $uv pip compile -q --universal --generate-hashes --python-version 3.11 --no-header \
        --override overrides.txt --excludes excludes.txt "$engine.in" -o "$engine.txt" "$@" || exit
done
$uv pip compile -q --universal --generate-hashes --python-version 3.11 --no-header uv.in -o uv.txt "$@"
