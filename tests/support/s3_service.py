"""An S3 service on loopback: moto, in a thread of this process."""

from __future__ import annotations

import http.client
import logging
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from moto.server import ThreadedMotoServer
from support.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

BUCKET = "blocks"


@contextmanager
def s3() -> Iterator[str]:
    """Run a service with one empty bucket; yield its URL."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=free_port(), verbose=False)
    server.start()
    url = f"http://127.0.0.1:{server._port}"
    try:
        with closing(http.client.HTTPConnection("127.0.0.1", server._port)) as connection:
            for method, path in (("POST", "/moto-api/reset"), ("PUT", f"/{BUCKET}")):
                connection.request(method, path)
                connection.getresponse().read()
        yield url
    finally:
        server.stop()
