"""The Node role: dials its Edge, runs the adapters that the Edge's config names, and executes what the Edge
sends.
"""
