"""Errors, ids, clock types and limits. Imports nothing of ours."""
