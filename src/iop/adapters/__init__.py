"""One adapter per kind of engine, all behind the one Protocol in :mod:`iop.adapters.base`."""
