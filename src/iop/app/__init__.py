"""Composition roots: the only place that picks concrete classes, and that touches the process around them."""
