"""A port of this host on which another process will soon listen."""

import random
import socket

_BELOW_CONNECTIONS = range(20000, 32768)
"""Linux takes the ports of outgoing connections from 32768 on: none of these is lost to one."""


def free_port() -> int:
    """Return a port that is free now and that no connection will take."""
    while True:
        port = random.SystemRandom().choice(_BELOW_CONNECTIONS)  # tests may have seeded `random`
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
