#!/usr/bin/env bash
# Runs the learner on this host: all its ranks, or one rank where torchrun has set RANK.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: BROKER_URL=URL launch/learner.sh [KEY=VALUE ...]

Environment, each of which may also be given as a setting on the command line:
  CONFIG        a preset's name or a YAML file, the same as the generators' (default: quickstart)
  BROKER_URL    tcp://HOST:PORT or redis://:PASSWORD@HOST:PORT/0; handed on through the environment, never in argv
  BROKER_KEY    file with the broker's key, copied from its run folder (default: broker.key in ours)
  LEARNER_HOST  address of this host that the generators reach, for the weights (default: weights_sync.host of CONFIG)

example: CONFIG=run.yaml BROKER_URL=tcp://10.0.0.5:5555 LEARNER_HOST=10.0.0.6 launch/learner.sh
TEXT
}

case "${1:-}" in -h | --help) usage; exit 0 ;; esac
[[ -z "${BROKER_URL:-}" ]] || export SLIPSTREAM_BROKER_URL="$BROKER_URL"
settings=()
[[ -z "${BROKER_KEY:-}" ]] || settings+=("broker.key_file=$BROKER_KEY")
[[ -z "${LEARNER_HOST:-}" ]] || settings+=("weights_sync.host=$LEARNER_HOST")
slipstream="$(command -v slipstream || true)"
[[ -n "$slipstream" ]] || slipstream="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv/bin/slipstream"
if [[ ! -x "$slipstream" ]]; then
  echo "learner.sh: no slipstream on PATH and none at $slipstream; run 'make .venv/.ready' in this checkout," \
    "or activate the environment that slipstream is installed in" >&2
  exit 127
fi
exec "$slipstream" learner -c "${CONFIG:-quickstart}" "${settings[@]}" "$@"
