#!/usr/bin/env bash
# The real GLM-Image on two GPUs of one machine: the AR stage on GPU 0, the diffusion stage on GPU 1.
#
# Needs: pip install 'omniqueue[gpu]', and a Redis or Valkey (this script starts the embedded one when
# OMNIQUEUE_REDIS_URL is not set). Each part is a process of its own, so any of them can run elsewhere.
set -euo pipefail

CONFIG=${CONFIG:-glm_image.yaml}
MODEL=${MODEL:-zai-org/GLM-Image}
PORT=${PORT:-8000}

if [ -z "${OMNIQUEUE_REDIS_URL:-}" ]; then
    exec omniqueue up "$CONFIG" --model "$MODEL" --port "$PORT"
fi

pids=()
stop() { kill "${pids[@]}" 2>/dev/null || true; wait; }
trap stop EXIT INT TERM

omniqueue --stage-id 0 --stage-configs-path "$CONFIG" --model "$MODEL" & pids+=($!)
omniqueue --stage-id 1 --stage-configs-path "$CONFIG" --model "$MODEL" & pids+=($!)
omniqueue --omni-router --stage-configs-path "$CONFIG" --model "$MODEL" --port "$PORT" & pids+=($!)

# More of stage 1, at any time, on any GPU; nothing else restarts:
#   CUDA_VISIBLE_DEVICES=2 OMNIQUEUE_STAGE_CONFIGS_PATH=$CONFIG OMNIQUEUE_MODEL=$MODEL \
#       celery -A omniqueue worker -Q stage1
wait
