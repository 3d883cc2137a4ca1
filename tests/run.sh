#!/usr/bin/env bash
# Style, types, spelling and tests.
#
#   bash tests/run.sh                       # without the tests marked slow
#   bash tests/run.sh --all                 # everything
#   bash tests/run.sh --gpu                 # experts, kernels, router and timers, on one GPU of this machine
#   bash tests/run.sh --python 3.12         # that Python, of PATH or pyenv, in an environment of its own: .venv-3.12
#   bash tests/run.sh -k router tests/      # other arguments go to pytest
#
# Three files of tests run at a time (pytest's -n 3): most tests wait for processes that they started. -n 0
# for one. The longest come first, by tests/durations.json, which --write-durations writes anew. Makes .venv
# when no environment with the dev packages is active. Every step runs; the exit code is 1 if one failed.
# Without --gpu the tests see no GPU: they start several ranks, and have the kernels interpreted.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=moe_exp/scripts/environment.sh
source moe_exp/scripts/environment.sh

select=(-m "not slow")
arguments=()
gpu=false
while [ $# -gt 0 ]; do
    case "$1" in
        --all) select=() ;;
        --gpu) gpu=true ;;
        --python)
            use_python "${2:?--python needs a version, as in --python 3.12}"
            shift
            ;;
        --python=*) use_python "${1#*=}" ;;
        -h | --help)
            print_help "${BASH_SOURCE[0]}"
            exit 0
            ;;
        *) arguments+=("$1") ;;
    esac
    shift
done

find_python dev
if ! "$gpu"; then
    export CUDA_VISIBLE_DEVICES=""
elif "$PYTHON" -c "import torch; raise SystemExit(not torch.cuda.is_available())"; then
    arguments=(
        tests/layers/kernels tests/layers/experts tests/layers/router/test_router.py
        tests/layers/dispatcher/test_deepep_dispatcher.py tests/layers/megatron/test_rotary.py
        tests/training/test_phases.py::test_sums_until_they_are_taken
        tests/training/test_recordings.py::test_snapshot_of_a_gpus_memory
        ${arguments[@]+"${arguments[@]}"}
    )
else
    echo "tests/run.sh: --gpu: torch sees no CUDA device. Fix: leave --gpu away, or install torch with CUDA." >&2
    exit 2
fi
export OMP_NUM_THREADS=1
unset PYTHONDONTWRITEBYTECODE # every rank would compile this package again

failed=()
step() {
    printf '\n== %s (%s)\n' "$1" "$(date +%T)"
    "$PYTHON" -m "${@:2}" || failed+=("$1")
}
failed_checks="$(mktemp)"
{ # beside the start of the tests, which print nothing until these have ended
    step "style" ruff check .
    step "format" ruff format --check .
    step "types" mypy
    step "spelling" codespell_lib README.md CONTRIBUTING.md CHANGELOG.md docs examples moe_exp tests bench
    [ "${#failed[@]}" -eq 0 ] || printf '%s\n' "${failed[@]}" >"$failed_checks"
} &
step "tests" pytest -n 3 --dist loadfile --no-loadscope-reorder --timeout=600 --durations=10 \
    ${select[@]+"${select[@]}"} ${arguments[@]+"${arguments[@]}"}

wait
while IFS= read -r name; do failed+=("$name"); done <"$failed_checks"
rm "$failed_checks"
if [ "${#failed[@]}" -gt 0 ]; then
    (IFS=, && echo "FAILED: ${failed[*]}")
    exit 1
fi
