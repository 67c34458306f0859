"""What the coordinator and the site agent would otherwise write twice: the contract between them.

Its rooms stand upon each other: ``records`` on ``rpc`` on ``tensors`` on ``signing`` on ``local``. It imports none of
the programs and no torch.
"""

import os

__version__ = "0.1.0"

# gRPC for Python cannot set a lowest TLS version. Our certificates are ECDSA, so with only an RSA suite allowed for
# TLS 1.2 no handshake below 1.3 can succeed. gRPC reads its environment once, when it is first imported; both programs
# import this package before it, and later would be too late.
TLS13_ONLY = {"GRPC_SSL_CIPHER_SUITES": "ECDHE-RSA-AES256-GCM-SHA384", "GRPC_ENABLE_FORK_SUPPORT": "0"}
os.environ.update(TLS13_ONLY)
# Whether there is a proxy on the way is for the site's own file to say (``site_agent.gateway.connection.proxy``).
os.environ.update({"no_grpc_proxy": ""})
# gRPC's own core writes a line for each connection that does not shake hands, as many as strangers like.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
