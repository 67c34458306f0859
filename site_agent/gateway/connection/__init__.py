"""The one connection to the coordinator. No other module of a site opens a network socket.

Holds every use of gRPC and protobuf at a site. Refuses what is not of its form before anything else sees it.
"""
