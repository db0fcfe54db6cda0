# syntax=docker/dockerfile:1
# The image of gptserve: storyteller inside, any other model mounted or fetched. The last target, cuda, is the default
# and needs only the NVIDIA driver on its host; cpu is the same without it.
ARG PYTHON_VERSION=3.12
# Such as sha256:0123..., which pins the base image to one build of it.
ARG BASE_DIGEST=

FROM python:${PYTHON_VERSION}-slim${BASE_DIGEST:+@$BASE_DIGEST} AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
RUN python3 -m venv --without-pip /opt/gptserve \
    && python3 -m venv /opt/sbom \
    && /opt/sbom/bin/pip install --no-cache-dir cyclonedx-bom==7.5.0
COPY pyproject.toml constraints.txt ./
# An index that holds the torch build to use, such as PyTorch's own of CPU builds; else pip's default, which for Linux
# on x86-64 is the CUDA build.
ARG TORCH_INDEX_URL=
RUN python3 -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
        extras = project['optional-dependencies']; \
        print(*project['dependencies'], *extras['otel'], *extras['postgres'], sep='\n')" > requirements.txt \
    && install="pip --python /opt/gptserve/bin/python install --no-cache-dir --constraint constraints.txt" \
    && $install ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} torch \
    && $install --requirement requirements.txt
COPY . .
RUN pip --python /opt/gptserve/bin/python install --no-cache-dir --no-deps .
# Headers, build tools, names for debuggers and the tests of libraries; nothing here is opened while serving.
RUN cd /opt/gptserve/lib/python3*/site-packages \
    && rm -rf torch/include torch/share/cmake torch/test \
    && find torch/bin -type f ! -name torch_shm_manager -delete \
    && find . -name '*.a' -delete \
    && find . -type d -name tests -prune -exec rm -rf {} + \
    && strip --strip-unneeded torch/lib/libtorch_*.so \
    && find . -name libtriton.so -exec strip --strip-unneeded {} +

RUN /opt/sbom/bin/cyclonedx-py environment --output-reproducible --output-file /opt/gptserve/sbom.cdx.json \
        /opt/gptserve/bin/python

FROM python:${PYTHON_VERSION}-slim${BASE_DIGEST:+@$BASE_DIGEST} AS runtime
# Any user may run it: docker gives one without a name the group 0.
RUN install --directory --owner 1000 --group 0 --mode 775 /cache /state
COPY --from=build /opt/gptserve /opt/gptserve
ENV PATH=/opt/gptserve/bin:$PATH \
    HF_HOME=/cache \
    XDG_CACHE_HOME=/cache \
    GPTSERVE_HOST=0.0.0.0
# /state is for --state-dir. Volumes can be written even where the container's own files cannot.
VOLUME ["/cache", "/state"]
USER 1000:1000
EXPOSE 8000
# Reads the same variables as the server, and the file that GPTSERVE_CONFIG names. Where flags set address or TLS, run
# with --no-healthcheck or give the same flags to a check of your own.
HEALTHCHECK --interval=10s --timeout=10s --start-period=120s --retries=3 \
    CMD ["gptserve", "health"]
ENTRYPOINT ["gptserve"]
CMD ["serve"]
ARG PYTHON_VERSION
ARG BASE_DIGEST
ARG REVISION=
LABEL org.opencontainers.image.title="gptserve" \
    org.opencontainers.image.description="An exact, small inference server for GPT-style language models" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.version="0.1.0" \
    org.opencontainers.image.revision="$REVISION" \
    org.opencontainers.image.base.name="docker.io/library/python:$PYTHON_VERSION-slim" \
    org.opencontainers.image.base.digest="$BASE_DIGEST"

FROM runtime AS cpu

FROM runtime AS cuda
# Triton compiles a launcher for each kernel; the base image has Python's headers.
USER root
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
USER 1000:1000
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    TRITON_CACHE_DIR=/cache/triton
