#!/usr/bin/env bash
# Runs the broker on this host.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: launch/broker.sh [KEY=VALUE ...]

Environment, each of which may also be given as a setting on the command line:
  CONFIG        a preset's name or a YAML file (default: quickstart)
  BROKER_HOST   address to listen on; set it to one that the other hosts reach (default: broker.host of CONFIG)
  BROKER_PORT   port; 0 or unset: as CONFIG says

On an address that others reach, clients need the key that the broker keeps in its run folder: copy broker.key to the
other hosts and name it there with BROKER_KEY.

example: CONFIG=run.yaml BROKER_HOST=10.0.0.5 BROKER_PORT=5555 launch/broker.sh
TEXT
}

case "${1:-}" in -h | --help) usage; exit 0 ;; esac
settings=()
[[ -z "${BROKER_HOST:-}" ]] || settings+=("broker.host=$BROKER_HOST")
[[ -z "${BROKER_PORT:-}" ]] || settings+=("broker.port=$BROKER_PORT")
slipstream="$(command -v slipstream || true)"
[[ -n "$slipstream" ]] || slipstream="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv/bin/slipstream"
if [[ ! -x "$slipstream" ]]; then
  echo "broker.sh: no slipstream on PATH and none at $slipstream; run 'make .venv/.ready' in this checkout," \
    "or activate the environment that slipstream is installed in" >&2
  exit 127
fi
exec "$slipstream" broker -c "${CONFIG:-quickstart}" "${settings[@]}" "$@"
