"""A real llama.cpp server as a process: ``llamacpp_server.py MODEL.gguf SLOTS_DIR NAME RAM_MIB [CONTEXT [JINJA]]``.

Prints its address when it serves. Ends with its standard input, so that it never outlives a test run.
"""

from __future__ import annotations

import sys

import xllamacpp


def main() -> None:
    """Serve until standard input ends."""
    left_out = ("131072", "1")[len(sys.argv) - 5 :]
    model, slots, name, ram_mib, context, jinja = (*sys.argv[1:], *left_out)
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.model_alias = {name}
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.n_ctx = int(context)  # shared by the slots
    params.n_parallel = 2
    params.use_jinja = jinja == "1"
    params.endpoint_metrics = params.endpoint_slots = params.endpoint_props = True
    if slots:
        params.slot_save_path = slots
    params.cache_ram_mib = int(ram_mib)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    sys.stdout.write(f"{server.listening_address}\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
