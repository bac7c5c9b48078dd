"""A bucket of a real server of S3's protocol, on this machine."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import fsspec
import pytest


@contextmanager
def s3_bucket() -> Iterator[str]:
    """The URL of a new bucket, for as long as the context lasts."""
    server_module = pytest.importorskip("moto.server", reason="needs pip install autopar[s3-test]")
    pytest.importorskip("s3fs")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    options = {"key": "k", "secret": "s", "client_kwargs": {"endpoint_url": f"http://{host}:{port}"}}
    fsspec.config.conf["s3"] = options
    # The server keeps buckets for as long as the process lives.
    bucket = f"bucket-{uuid.uuid4().hex}"
    fsspec.filesystem("s3", **options).mkdir(bucket)
    try:
        yield f"s3://{bucket}"
    finally:
        fsspec.config.conf.pop("s3", None)
        server.stop()
