# An image that a cluster can run: the wheel and its dependencies, a user without rights, `stoker` as the command.
#
#   docker build -t stoker .                                                                        for processors
#   docker build -t stoker:cuda --build-arg BASE=pytorch/pytorch:2.11.0-cuda12.8-cudnn9-runtime .   for NVIDIA GPUs
#   docker run --rm -v "$PWD:/work" stoker check job.yaml
#
# The CUDA base brings its own PyTorch, which satisfies the wheel's range and is kept.
ARG BASE=python:3.12-slim

FROM python:3.12-slim AS wheel
COPY pyproject.toml README.md LICENSE /source/
COPY src /source/src
RUN pip wheel --no-deps --wheel-dir /wheels /source

FROM ${BASE}
ARG EXTRAS=gguf,parquet,zstd,quantise,sentencepiece
COPY --from=wheel /wheels /wheels
# A base may mark the system's Python as externally managed, and may have a user 1000 already.
# The wheel has the version of the source and states those of its dependencies.
# hadolint ignore=DL3013
RUN wheel="$(ls /wheels/stoker-*.whl)" \
    && PIP_BREAK_SYSTEM_PACKAGES=1 pip install --no-cache-dir "${wheel}[${EXTRAS}]" \
    && useradd --create-home --uid 1000 --non-unique stoker \
    && mkdir /work && chown 1000 /work
USER 1000
WORKDIR /work
ENV HOME=/home/stoker PYTHONUNBUFFERED=1 STOKER_CACHE=/home/stoker/cache
ENTRYPOINT ["stoker"]
CMD ["--help"]
