"""Fixtures of the gRPC surface tests."""

from grpc_admin_rig import admin_address, channel, operations, principals, unused_address

__all__ = ["admin_address", "channel", "operations", "principals", "unused_address"]
