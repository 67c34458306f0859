"""Manifests and envelopes as messages of the contract: they stand in several messages, and in records' codecs."""

from collections.abc import Sequence

from wardround.errors import BadData
from wardround.signing import dsse
from wardround.tensors.manifests import MAX_TENSORS, MODEL, Entry, Manifest, TensorSpec
from wardround.v1 import federation_pb2 as pb
from wardround.v1 import tensors_pb2


def manifest_message(manifest: Manifest) -> tensors_pb2.Manifest:
    message = tensors_pb2.Manifest()
    bundle = None
    for entry in manifest.entries:
        spec = entry.spec
        if bundle is None or bundle.name != spec.bundle:
            bundle = message.bundles.add(name=spec.bundle)
        bundle.tensors.add(
            name=spec.name, dtype=spec.dtype, shape=spec.shape, encoding=entry.encoding, bytes=spec.bytes,
            sha256=bytes.fromhex(entry.sha256),
        )  # fmt: skip
    return message


def manifest_most_bytes(specs: Sequence[TensorSpec]) -> int:
    """No manifest of these tensors is longer as a message."""
    return sum(80 + len(spec.name) + len(spec.bundle) + 10 * len(spec.shape) for spec in specs)


def manifest_from(message: tensors_pb2.Manifest, most: int = MAX_TENSORS) -> Manifest:
    """A manifest of at most ``most`` tensors.

    Raises:
        BadData: more; or names, dtypes, shapes or digests of another form, or bytes that do not follow from them.
    """
    count = len(message.bundles)
    if count <= most:
        count = sum(len(bundle.tensors) for bundle in message.bundles)
    if count > most:
        raise BadData(f"a manifest of {count} tensors or bundles, at most {most} are taken", code="MANIFEST_NAMES")
    entries = []
    for bundle in message.bundles:
        for row in bundle.tensors:
            spec = TensorSpec(row.name, row.dtype, tuple(row.shape), bundle.name or MODEL)
            if row.bytes != spec.bytes:
                raise BadData(
                    f"`{spec.key}` says {row.bytes} bytes, its shape says {spec.bytes}", code="MANIFEST_SHAPE"
                )
            if len(row.sha256) != 32 or row.encoding != "raw":
                raise BadData(f"`{spec.key}` has no SHA-256 or an unknown encoding", code="MESSAGE_MALFORMED")
            entries.append(Entry(spec, bytes(row.sha256).hex(), row.encoding))
    return Manifest(tuple(entries))


def envelope_message(envelope: dsse.Envelope) -> pb.Envelope:
    return pb.Envelope(
        payload_type=envelope.payload_type, payload=envelope.payload, keyid=envelope.keyid, signature=envelope.signature
    )


def envelope_from(message: pb.Envelope) -> dsse.Envelope:
    return dsse.Envelope(message.payload_type, message.payload, message.keyid, message.signature)
