"""Process entry: ``python -P -m sidesave.writer_daemon FD``, with FD the inherited end of a socket pair."""

from __future__ import annotations

import logging
import os
import socket
import sys


def main() -> None:
    """Serve until done, then leave without waiting for a thread that storage may hold forever."""
    logging.basicConfig(level=logging.WARNING, format="sidesave daemon %(process)d: %(message)s")
    if len(sys.argv) != 2 or not sys.argv[1].isdigit():
        sys.exit("this is the writer daemon of sidesave; sidesave.Checkpointer starts it")
    from sidesave.writer_daemon.server import Server

    status = Server(socket.socket(fileno=int(sys.argv[1]))).run()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
