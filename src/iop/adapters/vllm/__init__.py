"""vLLM's HTTP server and its development-mode control routes."""
