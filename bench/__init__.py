"""Measurements: each module is a command that prints a figure beside what it is compared with."""
