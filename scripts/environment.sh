# Sourced by the other scripts: make_environment ROOT [EXTRA...] creates $VENV with the package in it, once.

find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3 python3.14 python3.13 python3.12 python3.11 python; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
    if [[ -n "${PYTHON:-}" ]]; then
      echo "error: PYTHON=$PYTHON is not Python 3.11 or newer" >&2
      return 2
    fi
  done
  echo "error: no Python 3.11 or newer found: install one, or name it by PYTHON=/path/to/python" >&2
  return 2
}

make_environment() {
  local root="$1" extras="${2:-}" python wanted
  VENV="${VENV:-$root/.venv}"
  # The mark names what was installed, so that a changed list of dependencies is installed anew.
  wanted="$root $extras $(cksum < "$root/pyproject.toml")"
  if [[ -f "$VENV/installed" && "$(cat "$VENV/installed")" == "$wanted" ]]; then
    return
  fi
  if [[ ! -x "$VENV/bin/python" ]]; then
    python="$(find_python)"
    echo "creating $VENV with $("$python" --version)"
    "$python" -m venv "$VENV"
  fi
  echo "installing logra_jax into $VENV (about half a minute, more on a slow line)"
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --editable "$root${extras:+[$extras]}"
  echo "$wanted" > "$VENV/installed"
}
