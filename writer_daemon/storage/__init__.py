"""Storage of checkpoints: a small ABC, and one module for each backend."""

from sidesave.writer_daemon.storage.base import InputFile, OutputFile, ReadStorage, Storage
from sidesave.writer_daemon.storage.descriptor import Descriptor
from sidesave.writer_daemon.storage.posix import PosixStorage

__all__ = ["Descriptor", "InputFile", "OutputFile", "PosixStorage", "ReadStorage", "Storage"]
