"""The Edge-Node wire without I/O: bytes in, events and bytes out."""
