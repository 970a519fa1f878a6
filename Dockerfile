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
RUN wheel="$(ls /wheels/stoker-*.whl)" \
    && pip install --no-cache-dir "$wheel[$EXTRAS]" \
    && useradd --create-home --uid 1000 stoker \
    && mkdir /work && chown stoker /work
USER stoker
WORKDIR /work
ENV PYTHONUNBUFFERED=1 STOKER_CACHE=/home/stoker/cache
ENTRYPOINT ["stoker"]
CMD ["--help"]
