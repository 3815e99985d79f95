# Sourced by the launch scripts: `ensure_venv DIR` makes the virtual environment DIR (taken from
# the project's folder) with what requirements.lock pins, and bfm itself in editable form.
# When DIR is as it should be, one Python start of some 30 ms finds that out and nothing else runs.
# Commands are joined by `||` rather than left to `set -e`, which callers' `if` switches off.
# shellcheck shell=bash

BFM_ROOT=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)

_say() { printf '%s\n' "$*" >&2; }

# Prints the interpreter behind the command $1 (not that of a virtual environment, which may be
# the one to be replaced). Fails with 3 where it is older than 3.11, 4 where it lacks venv.
_probe() {
  "$1" -Ic 'import sys
if sys.version_info < (3, 11): sys.exit(3)
try: import venv, ensurepip
except ImportError: sys.exit(4)
print(getattr(sys, "_base_executable", None) or sys.executable)' 2>/dev/null
}

# Prints a Python >= 3.11 that can make an environment: $PYTHON, or the first one on PATH.
find_python() {
  local name rc why=''
  for name in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python3.14 python; do
    rc=0
    _probe "$name" || rc=$?
    case $rc in
      0) return 0 ;;
      3) [ -n "${PYTHON:-}" ] && why="$name is older than Python 3.11" ;;
      4) why=${why:-"$name has no venv module (Debian and Ubuntu: install python3-venv)"} ;;
      *) [ -n "${PYTHON:-}" ] && why="$name does not run as a Python 3" ;;
    esac
    [ -z "${PYTHON:-}" ] || break
  done
  _say "bfm: ${why:-no Python 3.11 or newer found; install one or name it: PYTHON=/path/to/python}"
  return 2
}

# What the environment $2 should be when made with the Python $1; pyproject.toml stands last.
_stamp() {
  "$1" -ISc 'import hashlib, os, sys
def sha(name):
    with open(os.path.join(sys.argv[1], name), "rb") as f:
        return hashlib.sha256(f.read()).hexdigest()
print("python", " ".join(sys.version.split()))
print("folder", *sys.argv[1:])
print("lock", sha("requirements.lock"))
print("project", sha("pyproject.toml"))' "$BFM_ROOT" "$2" 2>/dev/null
}

# 0: $1 is as it should be; 1: only pyproject.toml is not as it was; 2: $1 is to be made.
# With PYTHON unset, the Python that made $1 is kept.
_state() {
  local want have
  [ -x "$1/bin/python" ] && have=$(cat -- "$1/.bfm-stamp" 2>/dev/null) || return 2
  want=$(_stamp "${PYTHON:-$1/bin/python}" "$1") || return 2
  [ "$have" != "$want" ] || return 0
  [ "${have%$'\n'*}" != "${want%$'\n'*}" ] || return 1
  return 2
}

# _log_run DIR WHAT COMMAND...: runs the command quietly; on failure says what failed, and why.
_log_run() {
  local log=$1.log what=$2
  shift 2
  "$@" >"$log" 2>&1 </dev/null && rm -f -- "$log" && return 0
  _say "bfm: $what failed; the end of $log:"
  tail -n 12 -- "$log" | cut -c 1-300 | sed 's/^/  /' >&2
  return 1
}

# _pip DIR WHAT ARGUMENTS...: pip of the environment DIR, whatever the user's own settings.
_pip() {
  local dir=$1 what=$2
  shift 2
  PIP_USER=0 _log_run "$dir" "installing $what" "$dir/bin/python" -I -m pip \
    --quiet --no-input --disable-pip-version-check "$@"
}

_build() {
  local dir=$1 py state=0 stamp
  _state "$dir" || state=$?
  [ "$state" != 0 ] || return 0 # another set-up made it while this one waited
  if [ "$state" = 1 ]; then
    py=$dir/bin/python
  else
    py=$(find_python) || return
  fi
  if ! stamp=$(_stamp "$py" "$dir"); then
    _say "bfm: requirements.lock or pyproject.toml is missing"
    return 1
  fi
  rm -f -- "$dir/.bfm-stamp"
  if [ "$state" = 2 ]; then
    if [ -e "$dir" ] && [ ! -e "$dir/.bfm-venv" ] && ! rmdir -- "$dir" 2>/dev/null; then
      _say "bfm: $dir was not made by this script; move it away and run this again"
      return 2
    fi
    _say "bfm: installing into $dir (once; some 200 MB to fetch, 1 GB on disk)"
    mkdir -p -- "$dir" || return 1
    : >"$dir/.bfm-venv" || return 1 # stays while the rest is removed: it says whose folder this is
    find "$dir" -mindepth 1 -maxdepth 1 ! -name .bfm-venv -exec rm -rf {} + || return 1
    _log_run "$dir" "$py -m venv" "$py" -I -m venv "$dir" || return 1
    # Byte code for the modules in use only, made by importing them: half the time of all of it.
    _pip "$dir" requirements.lock install --no-compile --require-hashes \
      -r "$BFM_ROOT/requirements.lock" || return 1
    _log_run "$dir" 'importing what was installed' "$dir/bin/python" -I -c \
      'import flax.nnx, hypothesis, jax.numpy, pytest
from transformers import AutoConfig, AutoTokenizer' || return 1
  fi
  _pip "$dir" 'bfm itself' install --no-index --no-deps --no-build-isolation -e "$BFM_ROOT" ||
    return 1
  # Last of all, and in one rename: only a finished environment has a stamp.
  printf '%s\n' "$stamp" >"$dir/.bfm-stamp.new" || return 1
  mv -f -- "$dir/.bfm-stamp.new" "$dir/.bfm-stamp"
}

# _locked DIR COMMAND...: one at a time (where flock exists). pip, left behind by a script that was
# killed, holds the lock to its end too.
_locked() {
  local dir=$1
  shift
  (
    if command -v flock >/dev/null && ! flock -n 9; then
      _say "bfm: waiting for another set-up of $dir"
      flock 9
    fi
    "$@"
  ) 9>"$dir.lock"
}

# ensure_venv DIR: afterwards DIR/bin/python runs bfm.
ensure_venv() {
  local dir=$1
  case $dir in /*) ;; *) dir=$BFM_ROOT/$dir ;; esac
  _state "$dir" || _locked "$dir" _build "$dir"
}
