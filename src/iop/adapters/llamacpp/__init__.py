"""llama.cpp's `llama-server`, with one model or as a router of several."""
