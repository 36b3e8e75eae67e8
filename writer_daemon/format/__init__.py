"""The files of a checkpoint and of a run, byte by byte."""
