# One image for the gateway and the workers, with the Python version that the tests use.
ARG PYTHON=3.11-slim-bookworm

FROM python:${PYTHON} AS build
WORKDIR /src
COPY pyproject.toml requirements.lock README.md LICENSE ./
COPY capsule_gateway capsule_gateway
COPY gateway gateway
COPY workers workers
COPY lua lua
COPY capsule capsule
RUN python -m venv /opt/capsule \
    && /opt/capsule/bin/python -m pip install --no-cache-dir --disable-pip-version-check -c requirements.lock '.[otel,s3]'

FROM python:${PYTHON}
# git, Node.js and npm are for builds; nginx serves the apps; bubblewrap, iproute2 and libseccomp2 confine both.
RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap ca-certificates git iproute2 libseccomp2 nginx-light \
        nodejs npm \
    && rm -rf /var/lib/apt/lists/*
RUN groupadd --gid 10001 capsule \
    && useradd --uid 10001 --gid capsule --no-create-home --home-dir /var/lib/capsule --shell /usr/sbin/nologin capsule \
    && install --directory --owner capsule --group capsule --mode 0750 /run/capsule /var/lib/capsule
COPY --from=build /opt/capsule /opt/capsule
ENV PATH=/opt/capsule/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    GATEWAY_DATA_DIR=/var/lib/capsule
USER 10001:10001
WORKDIR /var/lib/capsule
EXPOSE 8000 8080
# Listens on every interface of the container; the port mapping decides what is reachable from outside.
CMD ["capsule", "serve", "--host", "0.0.0.0"]
