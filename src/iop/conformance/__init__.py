"""The conformance suite of OpenEngineAdmin: any server, as a black box, over gRPC (AD-102).

It knows the published messages and nothing of our own server or client, so that a third party's server is judged by
the same words as ours.
"""
