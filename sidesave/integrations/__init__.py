"""Frameworks whose scripts save with sidesave: each module has the calls of one of them."""
