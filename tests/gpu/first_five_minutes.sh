#!/usr/bin/env bash
# The first five minutes with a GPU: what is this machine, do the CPU tests pass with its torch, do the GPU's, how fast.
# Run it in the project's directory, with the Python that has a CUDA build of torch:  tests/gpu/first_five_minutes.sh [python]
set -uo pipefail
python=${1:-python3}
failed=0

step() {
    printf '\n== %s\n' "$1"
    shift
    "$@" || { printf '== failed: %s\n' "$*"; failed=1; }
}

step "the machine" "$python" -c 'from octavo.runtime.cli import main; main()' doctor
step "tests that need no GPU, with this torch" env CUDA_VISIBLE_DEVICES= "$python" -m pytest -q -m 'not gpu' -n 8 \
    tests/kernels tests/model tests/passes tests/graphs tests/runtime
step "tests on the GPU" "$python" -m pytest -q -m gpu tests/gpu
step "eager, graphs and Inductor, a small model" "$python" -c 'from octavo.runtime.cli import main; main()' \
    bench graphs --weights random --preset tiny --chunk 512 --rows 1,16,128,512 --repeat 10
exit $failed
