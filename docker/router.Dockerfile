# syntax=docker/dockerfile:1
# The router, Flower and the omniqueue command: no torch, no vllm.
ARG PYTHON=3.12
FROM python:${PYTHON}-slim AS build
WORKDIR /src
COPY setup.cfg setup.py README.md ./
COPY omniqueue omniqueue
COPY workers workers
COPY web web
COPY stage_configs stage_configs
RUN python -m venv /opt/omniqueue && /opt/omniqueue/bin/pip install --no-cache-dir '.[flower,otel]'

FROM python:${PYTHON}-slim
RUN useradd --uid 10001 --create-home omniqueue \
    && install -d -o omniqueue -g omniqueue /var/lib/omniqueue/media
COPY --from=build /opt/omniqueue /opt/omniqueue
ENV PATH=/opt/omniqueue/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001
WORKDIR /home/omniqueue
EXPOSE 8000
CMD ["python", "-m", "web.server", "--bind", "0.0.0.0:8000"]
