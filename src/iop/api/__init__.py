"""Surfaces: what callers and operators reach from outside."""
