#!/bin/sh
# Prepares .venv: the project, editable, with the MLX build for this machine, and the tools of the tests.
# A second run finds its stamp and ends at once; a changed pyproject.toml or a moved folder makes it run again.
# PYTHON names the interpreter to use, as in `PYTHON=python3.12 make setup`.
set -eu
cd "$(dirname "$0")/.."

STAMP=.venv/mlx-swarm.stamp
BLAS_HINT="MLX will use its slow built-in BLAS: install OpenBLAS (\`apt install libopenblas0\`, or your system's \
package of it) for about 20 times the prompt speed and 8 times the batch speed"

main() {
    wanted="$(cat pyproject.toml .dev/setup.sh | cksum) $(pwd -P)"
    if [ -x .venv/bin/python ] && [ "$(cat $STAMP 2>/dev/null)" = "$wanted" ]; then
        return
    fi
    make_venv
    extra=$(choose_extra)
    say "installing mlx-swarm${extra:+ with MLX for $extra} into .venv (a minute or two the first time)"
    install --upgrade "pip>=25.1" # the first that knows --group
    install --editable ".${extra:+[$extra]}" --group dev
    if [ "$extra" = cpu ]; then
        provide_blas
    fi
    printf '%s\n' "$wanted" >$STAMP
    say "ready"
}

say() {
    printf 'setup: %s\n' "$*" >&2
}

fail() {
    say "$*"
    exit 1
}

install() {
    .venv/bin/python -m pip install -qq --disable-pip-version-check "$@"
}

make_venv() {
    rm -f $STAMP
    # A virtual environment knows its own folder: one that was moved or half made is made again.
    if .venv/bin/python -m pip --version >/dev/null 2>&1 && grep -qF "$(pwd -P)/.venv" .venv/pyvenv.cfg; then
        return
    fi
    python=$(find_python)
    if [ -z "$python" ]; then
        fail "no Python 3.11 or newer found (looked for: $(candidates)): install one, or name it with PYTHON=..."
    fi
    if ! has_venv; then
        install_package python3-venv
    fi
    if ! has_venv; then
        fail "$python has no venv module: install it (on Debian \`apt install python3-venv\`)"
    fi
    "$python" -m venv --clear .venv
}

candidates() {
    echo "${PYTHON:-python3 python3.13 python3.12 python3.11 python3.14}"
}

find_python() {
    for candidate in $(candidates); do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
}

has_venv() {
    "$python" -c 'import ensurepip, venv' 2>/dev/null
}

# The extra that brings MLX: none on a Mac, where the project itself depends on it.
choose_extra() {
    if [ "$(uname -s)" = Linux ]; then
        .venv/bin/python -c '
import ctypes
cuda, version = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
if cuda.cuInit(0) or cuda.cuDriverGetVersion(ctypes.byref(version)):
    raise SystemExit(1)
print("cuda13" if version.value >= 13000 else "cuda12")' 2>/dev/null || echo cpu
    fi
}

provide_blas() {
    if has_blas; then
        return
    fi
    install_package libopenblas0
    if ! has_blas; then
        say "$BLAS_HINT"
    fi
}

has_blas() {
    .venv/bin/python -c 'import ctypes; ctypes.CDLL("libopenblas.so.0")' 2>/dev/null
}

# Installs a Debian package where that needs no question asked; the caller looks whether it worked.
install_package() {
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        return
    fi
    say "installing $1"
    apt_install "$1" || { apt-get update -qq && apt_install "$1"; } >/dev/null 2>&1 || true
}

apt_install() {
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "$1" >/dev/null 2>&1 </dev/null
}

main
