# One image for the gateway and the workers. Python is the version that the tests run on.
ARG PYTHON=3.11-slim-bookworm

FROM python:${PYTHON} AS build
WORKDIR /src
COPY pyproject.toml requirements.lock README.md LICENSE ./
COPY gateway gateway
COPY workers workers
COPY lua lua
COPY capsule capsule
RUN python -m venv /opt/capsule \
    && /opt/capsule/bin/python -m pip install --no-cache-dir --disable-pip-version-check -c requirements.lock .

FROM python:${PYTHON}
# What builds need, and what serves the apps.
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates git nginx-light nodejs npm \
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
# Any interface of the container: what reaches it from outside, the port mapping decides.
CMD ["capsule", "serve", "--host", "0.0.0.0"]
