"""Engines that speak OpenEngine: normalised runs over Inference, and admin steps over their
OpenEngineAdmin.
"""
