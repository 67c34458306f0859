"""The names of ``RefusalCode`` in the contract: what the coordinator refuses with, and what a site declines with."""

from wardround.v1 import federation_pb2 as pb

REFUSAL_CODES = frozenset(name for name, _ in pb.RefusalCode.items())
VETO = "DECLINED_VETO"  # a site judges the round's model worse than it takes: the study pauses
DECLINE_CODES = frozenset(name for name in REFUSAL_CODES if name.startswith("DECLINED_"))
