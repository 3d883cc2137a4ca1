# shellcheck shell=bash
# Finds or creates the Python environment of moe_exp for the scripts that source this file:
#
#   source moe_exp/scripts/environment.sh
#   find_python EXTRA ...            # extras of setup.py: train, plan (no torch), dev, wandb, gpu, te, ...
#   moe_exp train "$@"               # find_python, then that command
#
# After find_python, $PYTHON has every dependency in a version that setup.py accepts, and imports this checkout. It
# is the first of:
#   1. $PYTHON, $VIRTUAL_ENV or $CONDA_PREFIX, if it meets the requirements; it is never changed
#   2. .venv in the repository
#   3. python3 or python on PATH, if it meets the requirements, as in a container
#   4. a new .venv, with the versions of constraints.txt. If a Python already has torch, .venv shares its packages.
# pip's own variables (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS) and files select the package index.
# Without them, a machine without GPUs installs torch from PyTorch's index of CPU builds, if it is reachable.

_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." >/dev/null && pwd -P)" # cd prints what CDPATH finds
_venv="$_root/.venv"
_count_gpus="from moe_exp.host.devices import count_gpus"
_cpu_index=https://download.pytorch.org/whl/cpu

_say() { printf '[%3d s] %s\n' "$SECONDS" "$*" >&2; }

_fail() {
    printf 'Error: %s\n' "$*" >&2
    exit 1
}

# Prints the header comment of script $1.
print_help() { awk 'NR > 1 { if (!sub(/^# ?/, "")) exit; print }' "$1"; }

# Runs command $1 of moe-exp with the arguments $2 ... of the script that sources this file; --help prints the
# script's header. `slurm` requires no torch if it starts nothing with this Python.
moe_exp() {
    local argument extra=train
    if [ "$1" = slurm ] && [ -n "${CONTAINER:-}" ]; then extra=plan; fi
    for argument in "${@:2}"; do
        if [ "$argument" = --help ] || [ "$argument" = -h ]; then
            print_help "$0"
            exit 0
        fi
        case "$1 $argument" in
            "slurm --dry-run" | "slurm --container" | "slurm --container="*) extra=plan ;;
        esac
    done
    find_python "$extra"
    if [ "$1" = train ]; then # shown in the commands that a run suggests at its end
        MOE_EXP_COMMAND="$(printf ' %q' bash "$0" "${@:2}")"
        export MOE_EXP_COMMAND="${MOE_EXP_COMMAND# }"
    fi
    exec "$PYTHON" -m moe_exp "$@"
}

# Makes find_python use Python $1, such as 3.12, from PATH or pyenv, in a separate environment next to .venv.
use_python() {
    local python
    for python in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python; do
        "$python" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$1')" 2>/dev/null || continue
        _venv="$_root/.venv-$1"
        unset VIRTUAL_ENV CONDA_PREFIX
        export PYTHON="$python"
        return
    done
    _fail "no Python $1 on PATH or in pyenv. Fix: install it, e.g. pyenv install $1"
}

_modern() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }

# Prints the requirements, including extras $2 ..., that Python $1 does not meet; fails if there are any.
_unmet() { _modern "$1" && "$1" -m moe_exp.commands.doctor --missing "${@:2}"; }

_python_of_path() {
    command -v python3 || command -v python || _fail "no Python on PATH. Fix: install Python 3.10 or newer"
}

find_python() {
    local python lacking extra
    if [ ! -f "$_root/setup.py" ]; then # installed by pip: its Python is the active one
        PYTHON="${PYTHON:-$(_python_of_path)}"
        lacking="$(_unmet "$PYTHON" "$@")" ||
            _fail "$PYTHON lacks ${lacking:-moe_exp}. Fix: activate the environment of moe_exp"
        export PYTHON
        return
    fi
    for extra in "$@"; do
        grep -q "^    \"$extra\": " "$_root/setup.py" || _fail "setup.py has no extra named $extra"
    done
    export PYTHONPATH="$_root${PYTHONPATH:+:$PYTHONPATH}"
    for python in "${PYTHON:-}" "${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}" \
        "${CONDA_PREFIX:+$CONDA_PREFIX/bin/python}"; do
        [ -n "$python" ] || continue
        command -v "$python" >/dev/null ||
            _fail "$python not found. Fix: unset PYTHON, or deactivate the environment"
        if lacking="$(_unmet "$python" "$@")"; then
            export PYTHON="$python"
            return
        fi
        _say "$python lacks ${lacking//$'\n'/, }; using ${_venv##*/} instead"
    done
    if ! _ready "$@"; then
        for python in python3 python; do
            [ "$_venv" = "$_root/.venv" ] || break # another Python was asked for
            if command -v "$python" >/dev/null && _unmet "$python" "$@" >/dev/null 2>&1; then
                export PYTHON="$python"
                return
            fi
        done
        _build "$@"
    fi
    export PYTHON="$_venv/bin/python"
}

_stamp() { { cat "$_root/setup.py" "$_root/constraints.txt" && printf '%s' "$_root"; } | cksum; }

# The stamp shows that .venv was completed from these files. The check of the packages shows that it has the extras
# and is still intact.
_ready() {
    [ "$(cat "$_venv/moe-exp-stamp" 2>/dev/null)" = "$(_stamp)" ] &&
        _unmet "$_venv/bin/python" "$@" >/dev/null 2>&1
}

_build() ( # in a subshell, which holds the lock until it ends
    exec 9<"$_root"
    if command -v flock >/dev/null && ! flock -n 9; then
        _say "waiting for another process that is creating $_venv"
        flock 9 || _say "this file system has no locks: make sure that no other process is creating $_venv"
    fi
    _ready "$@" && exit 0
    [ -w "$_root" ] ||
        _fail "$_root is read-only, cannot create .venv. Fix: activate an environment that meets setup.py"
    [ ! -e "$_venv" ] || [ -w "$_venv" ] || _fail "$_venv is not writable. Fix: remove it as its owner"
    rm -f "$_venv"/moe-exp-stamp*
    "$_venv/bin/python" -m pip --version >/dev/null 2>&1 || _new_venv
    _install "$@"
    if ! _works "$@"; then
        _say "$_venv is broken, recreating it"
        _new_venv
        _install "$@"
        _works "$@" ||
            _fail "the packages in $_venv cannot be imported, see above." \
                "Fix: use another Python (PYTHON=...), or remove .venv"
    fi
    _stamp >"$_venv/moe-exp-stamp"
    _say "$_venv is ready"
)

_new_venv() {
    local python modern="" shared=()
    for python in "${PYTHON:-}" "${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}" \
        "${CONDA_PREFIX:+$CONDA_PREFIX/bin/python}" \
        python3 python python3.13 python3.12 python3.11 python3.10 ""; do
        if [ -z "$python" ] || [ "$python" = "$_venv/bin/python" ] || ! _modern "$python"; then continue; fi
        modern="$python"
        "$python" -c 'import ensurepip, venv' 2>/dev/null && break
    done
    [ -n "$modern" ] || _fail "no Python 3.10 or newer found. Fix: install one, or point PYTHON to it"
    [ -n "$python" ] ||
        _fail "$modern cannot create virtual environments." \
            "Fix: install its venv package (Debian, Ubuntu: python3-venv)"
    # A container's torch was built for its GPUs, and its packages for that torch: reuse them.
    if "$python" -c 'import sys; sys.exit(sys.prefix != sys.base_prefix)' &&
        ! grep -q '^torch' <<<"$(_unmet "$python" train)"; then
        shared=(--system-site-packages)
    fi
    _say "creating $_venv with $("$python" --version) (${python})${shared[*]:+, sharing its torch}"
    "$python" -m venv --clear ${shared[@]+"${shared[@]}"} "$_venv"
}

_install() {
    local torch pins=(-c constraints.txt) lacks_torch=""
    cd "$_root" || exit
    if grep -q '^torch' <<<"$(_unmet "$_venv/bin/python" "$@")"; then lacks_torch=1; fi
    if grep -q '^include-system-site-packages = true' "$_venv/pyvenv.cfg"; then
        torch='from importlib.metadata import version; print(version("torch"))'
        torch="torch==$("$_venv/bin/python" -c "$torch")"
        pins=("$torch")
        export PIP_CONSTRAINT="" # of NVIDIA's images: it pins other versions than setup.py
    elif [ -n "$lacks_torch" ]; then
        torch="$(grep '^torch==' constraints.txt || echo torch)" # without a pin: the newest
        if _wants_cpu_build && _say "installing $torch, a CPU build from $_cpu_index" &&
            _pip --no-deps --index-url "$_cpu_index" "$torch"; then # its dependencies are installed below
            :
        else
            _say "installing $torch"
            _pip "${pins[@]}" "$torch"
        fi
    fi
    _pip "${pins[@]}" "setuptools>=77" # older ones cannot build without the wheel package
    _say "installing moe_exp${*:+ with $*} and missing dependencies"
    _pip "${pins[@]}" --no-build-isolation -e ".$(IFS=, && printf '%s' "${*:+[$*]}")"
    # On all cores; pip uses one. Files for other Python versions in some packages fail to compile.
    "$_venv/bin/python" -m compileall -q -j 0 -x '/tests?/' "$_venv/lib" >/dev/null 2>&1 || true
}

# Runs pip install, with pip's progress on a terminal; elsewhere prints a line per package of at least a megabyte.
_pip() {
    local pip=("$_venv/bin/python" -m pip install --no-compile --disable-pip-version-check) line
    local -x PIP_USER=0 PIP_ROOT_USER_ACTION=ignore # not outside .venv, where a site's settings may point
    if [ -t 2 ]; then
        "${pip[@]}" "$@" >&2
        return
    fi
    {
        "${pip[@]}" --progress-bar off "$@" 2> >(grep -v '^WARNING: [^R]' >&2) || # except retries
            printf '%s\n' "failed with $?"
    } | {
        while IFS= read -r line; do
            case "$line" in
                "failed with "*) return "${line#failed with }" ;;
                *"Downloading "*\ [MG]B\) | *"Using cached "*\ [MG]B\)) _say "  ${line#"${line%%[! ]*}"}" ;;
            esac
        done
    }
}

# Whether to install torch from PyTorch's index of CPU builds: no GPU, no index or package folder configured for
# pip, and a response within five seconds. On macOS, every index has CPU builds.
_wants_cpu_build() {
    local ask="import sys, urllib.request as u; u.urlopen(sys.argv[1] + '/torch/', timeout=5).close()" config
    [ "$(uname)" = Linux ] || return 1
    # ignore the devices of this call, as .venv outlives it
    if env -u CUDA_VISIBLE_DEVICES "$_venv/bin/python" -c "import sys; $_count_gpus; sys.exit(not count_gpus())"; then
        return 1
    fi
    if command -v sbatch >/dev/null && [ "${CPU_NODES:-false}" = false ]; then
        _say "no GPU here, but jobs run on other nodes: torch with CUDA (unless CPU_NODES=true)"
        return 1
    fi
    config="$("$_venv/bin/python" -m pip config list 2>/dev/null)" || config=""
    if grep -qE '(index|index-url|find-links)=' <<<"$config"; then # no pipe: pip would end with SIGPIPE
        _say "no GPU here: installing torch from the index configured for pip"
        return 1
    fi
    if "$_venv/bin/python" -c "$ask" "$_cpu_index" 2>/dev/null; then return 0; fi
    _say "no GPU here, but $_cpu_index is unreachable: installing torch from pip's default index, with CUDA"
    return 1
}

_works() {
    _say "checking the packages"
    local modules="numpy, pydantic, tokenizers"
    if [ "$*" != plan ]; then modules="torch, megatron.core, $modules"; fi
    _unmet "$_venv/bin/python" "$@" >&2 && "$_venv/bin/python" -W ignore -c "import $modules"
}
