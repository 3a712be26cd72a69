"""Fixtures of the gRPC surface tests."""

from grpc_admin_rig import admin_address, channel, metrics, operations, principals, unused_address

__all__ = ["admin_address", "channel", "metrics", "operations", "principals", "unused_address"]
