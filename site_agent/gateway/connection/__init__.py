"""The one connection to the coordinator: its calls, the session over them, an upload's stream, backoff, the relay.

Imports ``wardround`` and ``site_agent.state``; holds every use of gRPC and protobuf at a site. Refuses what has not its
form before anything else sees it, and no other module of a site opens a network socket.
"""
