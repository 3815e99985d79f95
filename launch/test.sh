#!/usr/bin/env bash
# Runs the tests in an environment of their own (.venv-test); `--help` tells the rest.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: bash launch/test.sh [--all] [--python VERSION] [pytest arguments...]

Without --all: the tests that need no torch, but for those of several processes and whole runs, which
take half a minute or more each. Tests that are named run whatever they take.
With --all, what CI runs: ruff's checks, the whole suite (torch and accelerate are installed for
the parity tests), and launch/quickstart.sh. Paths are taken from the project's folder:
  bash launch/test.sh tests/test_dialogue.py -k duplicate
--python 3.13 uses the command python3.13, with the newest jax that it has, in an environment of its
own (.venv-test-3.13); PYTHON=... names any Python from 3.11. JAX_PLATFORMS is cpu unless set.
TEXT
}

all=false
args=()
suffix=
while [ "$#" -gt 0 ]; do
  case $1 in
    --all) all=true ;;
    --python)
      [[ ${2:-} =~ ^3\.[0-9]+$ ]] || { echo "--python: give a version such as 3.13" >&2; exit 2; }
      export PYTHON=python$2
      suffix=-$2
      shift
      ;;
    -h | --help) usage; exit 0 ;;
    *) args+=("$1") ;;
  esac
  shift
done

# shellcheck source=launch/setup.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"
cd -- "$BFM_ROOT"
venv=$BFM_ROOT/.venv-test$suffix
export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"
parity=(torch==2.13.0 accelerate==1.15.0)
failed=()
trap 'exit 130' INT # else bash goes on to the next step after pytest's own handling

# step NAME COMMAND...: a heading, the command, and a note of its failure.
step() {
  local name=$1 from=$SECONDS
  shift
  printf '\n== %s\n' "$name"
  "$@" || failed+=("$name")
  printf -- '-- %s: %d s\n' "$name" "$((SECONDS - from))"
}

# Adds what the parity tests compare with, at the versions the lock allows. While pip is at work the
# environment's stamp is put aside, so that an interrupted run has it made again.
install_parity() {
  local stamp=$venv/.bfm-stamp rc=0
  [ "$(cat -- "$venv/.bfm-parity" 2>/dev/null)" != "${parity[*]}" ] || return 0
  printf 'installing %s (once)\n' "${parity[*]}"
  sed -e '/^ *--hash/d' -e 's/ *\\$//' requirements.lock >"$venv/constraints.txt" || return 1
  mv -- "$stamp" "$stamp.aside" || return 1
  _pip "$venv" "${parity[*]}" install -c "$venv/constraints.txt" "${parity[@]}" || rc=1
  [ "$rc" != 0 ] || printf '%s\n' "${parity[*]}" >"$venv/.bfm-parity" || rc=1
  mv -- "$stamp.aside" "$stamp" || rc=1
  return "$rc"
}

# The whole suite runs on every core; a part that was asked for runs as pytest runs it.
run_pytest() {
  if [ "${#args[@]}" = 0 ]; then
    "$venv/bin/python" -m pytest "$@" -n auto --dist worksteal
  else
    "$venv/bin/python" -m pytest "$@" "${args[@]}"
  fi
}

ensure_venv "$venv" || exit
if $all; then
  export CI=true # hypothesis then draws the same examples on every run
  step 'ruff check' "$venv/bin/python" -m ruff check .
  step 'ruff format' "$venv/bin/python" -m ruff format --check .
  step 'torch for the parity tests' _locked "$venv" install_parity
  step 'installed versions agree' "$venv/bin/python" -I -m pip check
  if [ "$(cat -- "$venv/.bfm-parity" 2>/dev/null)" = "${parity[*]}" ]; then
    step 'tests' run_pytest
  else
    step 'tests that need no torch' run_pytest -m 'not torch'
  fi
  step 'quickstart' bash launch/quickstart.sh
else
  quick='not torch'
  [ "${#args[@]}" != 0 ] || quick='not torch and not slow'
  step 'tests that need no torch' run_pytest -m "$quick"
fi

echo
if [ "${#failed[@]}" -gt 0 ]; then
  printf 'failed:'
  printf ' [%s]' "${failed[@]}"
  echo
  exit 1
fi
echo 'all passed'
