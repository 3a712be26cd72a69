"""TensorRT-LLM's HTTP server."""
