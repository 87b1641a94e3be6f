#!/usr/bin/env bash
# Runs one generator on this host.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: BROKER_URL=URL launch/generator.sh [KEY=VALUE ...]

Environment, each of which may also be given as a setting on the command line:
  CONFIG         a preset's name or a YAML file, the same as the learner's (default: quickstart)
  BROKER_URL     tcp://HOST:PORT or redis://:PASSWORD@HOST:PORT/0; handed on through the environment, never in argv
  BROKER_KEY     file with the broker's key, copied from its run folder (default: broker.key in ours)
  GENERATOR_ID   name among the members (default: host and process id)

example: CONFIG=run.yaml BROKER_URL=tcp://10.0.0.5:5555 launch/generator.sh generator.threads=2
TEXT
}

case "${1:-}" in -h | --help) usage; exit 0 ;; esac
[[ -z "${BROKER_URL:-}" ]] || export SLIPSTREAM_BROKER_URL="$BROKER_URL"
settings=()
[[ -z "${BROKER_KEY:-}" ]] || settings+=("broker.key_file=$BROKER_KEY")
name=()
[[ -z "${GENERATOR_ID:-}" ]] || name=(--id "$GENERATOR_ID")
slipstream="$(command -v slipstream || true)"
[[ -n "$slipstream" ]] || slipstream="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv/bin/slipstream"
if [[ ! -x "$slipstream" ]]; then
  echo "generator.sh: no slipstream on PATH and none at $slipstream; run 'make .venv/.ready' in this checkout," \
    "or activate the environment that slipstream is installed in" >&2
  exit 127
fi
exec "$slipstream" generator -c "${CONFIG:-quickstart}" "${name[@]}" "${settings[@]}" "$@"
