"""The gRPC surfaces: Inference, Control, OpenEngineAdmin, health and reflection."""
