#!/bin/sh
# Writes `.env` for compose.yaml, with random secrets: ./make_env.sh MODEL_DIR
set -eu
if [ $# != 1 ] || [ ! -f "$1/config.json" ]; then
    echo "usage: make_env.sh MODEL_DIR, a directory with config.json" >&2
    exit 2
fi
model=$(realpath "$1")
cd "$(dirname "$0")"
if [ -e .env ]; then
    echo "$PWD/.env exists: delete it to generate new secrets" >&2
    exit 1
fi
umask 077
random() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }
cat > .env <<END
LORAMUX_MODEL_DIR=$model
LORAMUX_ADMIN_KEY=$(random)
LORAMUX_METRICS_TOKEN=$(random)
POSTGRES_PASSWORD=$(random)
S3_ACCESS_KEY=loramux
S3_SECRET_KEY=$(random)
GRAFANA_PASSWORD=$(random)
END
echo "wrote $PWD/.env"
