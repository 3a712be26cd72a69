"""IOP: one gateway in front of many nodes of inference engines, and one service to operate them all."""

__version__ = "0.1.0"
