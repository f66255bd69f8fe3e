# Image of the sandbox server, with the toolchains of the most common languages:
#
#   docker build -f docker/sandbox.Dockerfile -t toolroll-sandbox .
#
# The server runs as root, on purpose: in a default container it uses isolation tier C (Landlock and seccomp), in which
# root is needed to give each program a separate user. The container is not privileged, and the server needs only the
# capabilities SETUID, SETGID, KILL, CHOWN and DAC_OVERRIDE: docker/compose.yaml and examples/sandbox/kubernetes.yaml
# drop the others.
# A non-root user would need Linux 6.12, and all programs would share that user. See docs/security.md.

FROM python:3.11-slim-trixie AS wheel
WORKDIR /src
# Only these paths are needed, so that no .dockerignore has to exclude the rest of the checkout.
COPY pyproject.toml README.md LICENSE ./
COPY toolroll toolroll
COPY examples examples
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

# Debian's npm depends on several hundred packages. This stage installs tsx, and only its result is copied.
FROM node:22-slim AS node
RUN npm install --global tsx@4.23.15

FROM python:3.11-slim-trixie
LABEL org.opencontainers.image.source=https://github.com/toolroll/toolroll \
      org.opencontainers.image.licenses=Apache-2.0

# bash and Python's sqlite3 are in the base image. Versions are not pinned: a Debian release only receives fixes, and
# its index does not keep older versions.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        default-jdk-headless g++ golang-go lua5.4 perl php-cli ruby rustc \
    && rm -rf /var/lib/apt/lists/*

COPY --from=node /usr/local/bin/node /usr/local/bin/node
COPY --from=node /usr/local/lib/node_modules/tsx /usr/local/lib/node_modules/tsx
RUN ln -s ../lib/node_modules/tsx/dist/cli.mjs /usr/local/bin/tsx

# Packages that programs can import, separated by spaces. Add versions for builds that can be repeated. pytest also
# enables the language `pytest`.
ARG PACKAGES="numpy pandas pytest scipy sympy"
COPY --from=wheel /wheels /wheels
# hadolint ignore=DL3013,SC2086
RUN pip install --no-cache-dir "$(echo /wheels/toolroll-*.whl)[sandbox]" $PACKAGES \
    && rm -r /wheels

EXPOSE 8080
# The server answers 503 while it shuts down, which urlopen raises as an error.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/v1/ping', timeout=4)"]

# No ENTRYPOINT: `args` of a Kubernetes container then replaces the whole command. If TOOLROLL_SANDBOX_TOKEN is set when
# the container starts, clients must send this token.
CMD ["toolroll", "sandbox", "serve", "--host", "0.0.0.0", "--port", "8080"]
