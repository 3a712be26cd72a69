"""Generated protobuf bindings; see tools/gen_proto.py. Never edited by hand (EN-03)."""
