"""The Edge role: Node registry, provider pools, dispatch, and admin participants over Nodes.

Theory of operation. `registry` decides who owns a Node id, `pools` decides who runs where and when, `outcomes` decides
how a request ended: plain state machines that take events with the time and return effects. `nodes` and `dispatch` are
the asyncio shell around them: they carry effects to connections and connection callbacks back, in the same turn of the
loop, so that a fence, the return of its leases and the re-evaluation of the queue are one step (EN-30, EN-31, EN-34).
"""
