"""Tensors into slots of staging memory."""
