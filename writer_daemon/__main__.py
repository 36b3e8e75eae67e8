"""Process entry: ``python -P -m sidesave.writer_daemon FD``.

FD is the inherited end of a socket pair.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading

logger = logging.getLogger(__name__)


def main() -> None:
    """Serve until done, then exit without waiting for a thread that storage may hold for ever."""
    logging.basicConfig(level=logging.WARNING, format="sidesave daemon %(process)d: %(message)s")
    if len(sys.argv) != 2 or not sys.argv[1].isdigit():
        sys.exit("this is the writer daemon of sidesave; sidesave.Checkpointer starts it")
    from sidesave.writer_daemon.process.server import Server

    threading.excepthook = _end_process
    try:
        status = Server(socket.socket(fileno=int(sys.argv[1]))).run()
    except BaseException:  # the client is told why a daemon has ended, whatever it was
        logger.exception("the loop of the daemon failed")
        status = 1
    sys.stderr.flush()
    os._exit(status)


def _end_process(failed: threading.ExceptHookArgs) -> None:
    """End the daemon if a thread dies.

    Otherwise the daemon would send heartbeats and do nothing; a successor can do better.
    """
    try:
        name = failed.thread.name if failed.thread is not None else "a thread"
        logger.error("%s of the daemon died", name, exc_info=failed.exc_value)
        sys.stderr.flush()
    finally:
        os._exit(1)


if __name__ == "__main__":
    main()
