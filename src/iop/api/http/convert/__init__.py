"""Conversion between the chat dialects: requests, whole answers and streams (SF-01, SF-10)."""
