"""The contract on the wire: the .proto files, and the stubs generated from them.

Imports protobuf and gRPC alone. Used by the codecs of ``wardround.records``, by servicers and by the site's connection.
"""
