"""HTTP surfaces: the strict HTTP/1.1 server, the OpenAI and Anthropic routes of the Edge, the engine's own
routes.
"""
