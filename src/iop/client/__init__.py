"""Typed clients for the command line, the console and tests."""
