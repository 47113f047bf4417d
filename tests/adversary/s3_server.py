"""An S3 server in memory that answers like a real one: `python -m tests.adversary.s3_server PORT`.

moto's own server closes each connection after a response and sends every header of it on its own, which wakes the
client up to thirty times per call. Real servers keep connections and send a short response in one piece.
"""

from __future__ import annotations

import sys

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, run_simple


class _Handler(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1

    def handle_expect_100(self) -> bool:
        """Ask for the body, once and at once. werkzeug would ask a second time."""
        super().handle_expect_100()
        self.wfile.flush()
        del self.headers["expect"]
        return True


if __name__ == "__main__":
    app = DomainDispatcherApplication(create_backend_app)
    run_simple("127.0.0.1", int(sys.argv[1]), app, threaded=True, request_handler=_Handler)
