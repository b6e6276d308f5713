# syntax=docker/dockerfile:1
ARG PYTHON=3.13

FROM python:${PYTHON}-slim AS requirements
COPY pyproject.toml /
RUN python -c "import tomllib; print(*tomllib.load(open('/pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
    > /requirements.txt

# A layer of their own, which only another list of them makes anew: hundreds of megabytes that updates need not fetch.
# Not the slim image: this one has strip.
FROM python:${PYTHON} AS libraries
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
COPY --from=requirements /requirements.txt /
RUN python -m venv --without-pip /opt/ullage && pip --python /opt/ullage/bin/python install --no-compile -r /requirements.txt
# Half of their 400 MB is never run here: pages and a native part of LiteLLM's own proxy, the services of AWS that serve
# no models, what downloads from Hugging Face, tests, debug symbols.
RUN libraries=$(echo /opt/ullage/lib/python*/site-packages) \
    && pip --python /opt/ullage/bin/python uninstall --yes hf-xet huggingface-hub fsspec \
    && rm -r "$libraries/litellm/proxy/_experimental/out" "$libraries/litellm/proxy/swagger" \
        "$libraries/litellm/rust_bridge/_native.abi3.so" \
    && find "$libraries/botocore/data" -mindepth 1 -maxdepth 1 -type d \
        ! -name 'bedrock*' ! -name 'sagemaker*' ! -name 'sso*' ! -name sts ! -name signin -exec rm -r {} + \
    && find "$libraries" -type d -name tests -prune -exec rm -r {} + \
    && find "$libraries" -name '*.so' -exec strip --strip-unneeded {} + \
    # Compiled here, since the running container may not write beside its code.
    && python -m compileall -q -x 'litellm/proxy/|pygments/(lexers|styles)/' "$libraries"

FROM libraries AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY .ci/urls.py .ci/
COPY config config
COPY proxy proxy
RUN pip --python /opt/ullage/bin/python install --compile --no-deps --prefix /opt/package . \
    && install -d -m 0700 -o 65532 -g 65532 /data

FROM python:${PYTHON}-slim
# The base image brings its library without bytecode, and a container that may not write would compile it at each start:
# half of a start's processor time, for 9 MB.
RUN python -m compileall -q -x '/(site-packages|ensurepip|idlelib|pydoc_data|tkinter|turtledemo|unittest)/' /usr/local/lib/python*
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="ullage" \
      org.opencontainers.image.description="An OpenAI-compatible reverse proxy that keeps every conversation inside the model's window." \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=libraries /opt/ullage /opt/ullage
COPY --from=build /opt/package /opt/ullage
COPY --from=build --chown=65532:65532 /data /data
ENV PATH=/opt/ullage/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/data
# Bodies of half a megabyte and more stay in the heap; by default glibc maps and unmaps each one, at 5.7 ms of CPU
# instead of 2.1 for a body of 1.5 MB. Costs up to 6 MB of memory.
ENV MALLOC_MMAP_THRESHOLD_=67108864 \
    MALLOC_TRIM_THRESHOLD_=268435456 \
    MALLOC_TOP_PAD_=16777216
# A container is reached from outside or not at all. Nothing here sets server.open: with an upstream key and no
# access_keys the proxy refuses to start, and whoever wants that anyway has to say so.
# The store makes a directory of its own in the volume, since a mounted one may belong to somebody else.
ENV ULLAGE_SERVER__HOST=0.0.0.0 \
    ULLAGE_SERVER__PORT=8484 \
    ULLAGE_STORE__PATH=/data/ullage
USER 65532:65532
WORKDIR /data
VOLUME /data
EXPOSE 8484
STOPSIGNAL SIGTERM
# What `ullage health` asks, without a Python for it: 5 ms of processor time instead of 350.
HEALTHCHECK --interval=10s --timeout=5s --start-period=20s --retries=3 CMD ["bash", "-c", "\
exec 3<>/dev/tcp/127.0.0.1/$ULLAGE_SERVER__PORT && \
printf 'GET /health/ready HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\n\\r\\n' >&3 && \
read -r status <&3 && [[ $status == *' 200 '* ]]"]
ENTRYPOINT ["ullage"]
CMD ["serve"]
