# syntax=docker/dockerfile:1
# One stage of a pipeline. Targets: cpu (runs anywhere) and cuda (needs the NVIDIA container toolkit on the host).
# hadolint global ignore=DL3013
ARG PYTHON=3.12
FROM python:${PYTHON}-slim AS base
# A compiler: the engines compile kernels when they load.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ libgomp1 libnuma1 \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --create-home omniqueue \
    && install -d -o omniqueue -g omniqueue /var/lib/omniqueue/media /models
WORKDIR /src
COPY setup.cfg setup.py README.md ./
COPY omniqueue omniqueue
COPY workers workers
COPY web web
COPY stage_configs stage_configs
RUN python -m venv /opt/omniqueue
ENV PATH=/opt/omniqueue/bin:$PATH PYTHONUNBUFFERED=1

# vllm-omni comes without its dependencies: its own list has wheels for CUDA only; setup.cfg names the rest.
FROM base AS cpu
# Where pip finds torch's CPU build, should the index in use not have it (see the README).
ARG PIP_EXTRA_INDEX_URL=
RUN pip install --no-cache-dir '.[cpu,otel]' && pip install --no-cache-dir --no-deps vllm-omni==0.30.0
USER 10001
WORKDIR /home/omniqueue
CMD ["celery", "-A", "omniqueue", "worker", "-Q", "stage0"]

FROM base AS cuda
RUN pip install --no-cache-dir '.[gpu,otel]'
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001
WORKDIR /home/omniqueue
CMD ["celery", "-A", "omniqueue", "worker", "-Q", "stage0"]
