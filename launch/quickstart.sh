#!/usr/bin/env bash
# Runs the whole method on a small bundled history with a small real model, on a plain CPU, from any
# folder. The first run makes .venv in the project's folder (PYTHON=... chooses the Python, 3.11 or
# newer); later runs start at once and need no network for it. Arguments go to launch/quickstart.py.
set -euo pipefail

# shellcheck source=launch/setup.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"

ensure_venv .venv || exit
exec "$BFM_ROOT/.venv/bin/python" "$BFM_ROOT/launch/quickstart.py" "$@"
