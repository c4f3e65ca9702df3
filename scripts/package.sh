#!/usr/bin/env bash
# Prove the package: build it, install the wheel in a fresh environment outside the tree, and use it from elsewhere.
#
#   scripts/package.sh PYTHON BUILDER
#
# PYTHON makes the fresh environment; BUILDER is an interpreter that has the package `build`.
set -euo pipefail
python=$1
builder=$2
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
outside=$(mktemp -d)
trap 'rm -rf "$outside"' EXIT

# The wheel is built from the source distribution, so this proves both.
"$builder" -m build --outdir "$outside/dist" "$root" >"$outside/build.log" 2>&1 || {
    cat "$outside/build.log"
    exit 1
}
"$python" "$root/scripts/environment.py" "$outside/venv" "$outside"/dist/*.whl

cd "$outside"
installed=$(venv/bin/python -c 'import octavo; print(octavo.__file__)')
case $installed in
"$outside"/venv/*) ;;
*)
    echo "package: imported $installed instead of the installed wheel"
    exit 1
    ;;
esac
venv/bin/octavo checkpoint init --preset mini model --seed 0
venv/bin/octavo generate --model model --max-tokens 8 "Explain what an octavo is."
venv/bin/octavo generate --no-thinking "Explain what an octavo is." | grep "^An octavo is a book"
venv/bin/octavo graphs dump --out dump
grep -q "octavo-nano" dump/report.html
echo "package: $(basename dist/*.whl) works from outside the tree"
