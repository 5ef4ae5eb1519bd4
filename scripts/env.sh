# Sourced by the scripts beside it: the one place that makes .venv.
#   ensure_env       the package, editable
#   ensure_env dev   the package with the tools for tests and checks
#   ensure_env long  the same with what the long tests need: torch and transformers
# Installs only when pyproject.toml changed, the folder moved, or an extra is missing.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV="$ROOT/.venv"
PYTHON="$VENV/bin/python"

say() { printf '%s\n' "$*" >&2; }

find_python() {
  local name found=""
  for name in python3.13 python3.12 python3.11 python3; do
    # Run it, don't just look: a version manager leaves stubs for versions that are not active.
    local version
    version=$("$name" -c 'import platform; print(platform.python_version())' 2>/dev/null) || continue
    if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
      echo "$name"
      return
    fi
    found="$found $name is $version,"
  done
  say "mlx-worker needs Python 3.11 or newer; found:${found:- no python3,} nothing newer."
  say "hint: brew install python@3.13 (macOS) or apt-get install python3 python3-venv (Debian, Ubuntu)"
  return 1
}

is_fresh() {
  local level
  for level in $1; do
    if [ -f "$VENV/installed-$level" ] && [ "$(cat "$VENV/installed-$level")" = "$STAMP" ]; then return; fi
  done
  return 1
}

ensure_env() {
  local want=${1:-base} base_python spec enough
  case $want in
    base) spec="$ROOT" enough="base dev long" ;;
    dev) spec="$ROOT[dev]" enough="dev long" ;;
    long) spec="$ROOT[dev,parity]" enough=long ;;
  esac
  STAMP="$ROOT $(cksum <"$ROOT/pyproject.toml")"
  if "$PYTHON" -c pass 2>/dev/null; then
    if is_fresh "$enough"; then return; fi
  else
    base_python=$(find_python)
    say "making .venv with $("$base_python" --version)"
    if ! "$base_python" -m venv --clear "$VENV"; then
      say "hint: on Debian and Ubuntu, apt-get install python3-venv"
      return 1
    fi
  fi
  say "installing mlx-worker ($want) into .venv; the first time takes a minute or two"
  # -qq leaves errors only.
  "$PYTHON" -m pip install -qq --disable-pip-version-check --no-input -e "$spec"
  printf '%s' "$STAMP" >"$VENV/installed-$want"
}
