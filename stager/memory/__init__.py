"""Shared host memory, page-locked for devices."""
