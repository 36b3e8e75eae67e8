"""Adapters that let other frameworks save with sidesave, one framework per module."""
