"""SGLang's HTTP server."""
