"""The software bill of materials: every distribution that is installed here, as CycloneDX 1.6, judged by its schema."""

import datetime
import uuid
from importlib import metadata

from wardround import __version__
from wardround.errors import BadData, NeedsPerson
from wardround.local.distributions import described, normalized

NAMESPACE = uuid.UUID("6f8e2d2a-5f0e-4b0b-9b53-0f6d2f0c7a11")  # of serial numbers: the same content has the same one
LONGEST_LICENSE = 100  # characters; some packages have the whole text there
HINT = "pip install 'wardround[sbom]'"


def sbom(site: str, now: datetime.datetime) -> bytes:
    """The bill of this Python environment as JSON.

    Raises:
        NeedsPerson: what writes it is not installed.
        BadData: what it wrote is not CycloneDX, by CycloneDX's own schema.
    """
    try:
        from cyclonedx.exception import MissingOptionalDependencyException
        from cyclonedx.model import Property
        from cyclonedx.model.bom import Bom
        from cyclonedx.model.component import Component, ComponentType
        from cyclonedx.model.license import DisjunctiveLicense
        from cyclonedx.output.json import JsonV1Dot6
        from cyclonedx.schema import SchemaVersion
        from cyclonedx.validation.json import JsonStrictValidator
        from packageurl import PackageURL
    except ModuleNotFoundError as error:
        raise NeedsPerson(
            f"{error.name} is not installed here, and the pack's bill of software needs it", hint=HINT
        ) from None
    bom, pinned = Bom(), []
    for found in _installed():
        name, version, license_ = normalized(found.name), found.version, _license(found)
        files = described(found).sha256
        bom.components.add(
            Component(
                name=name,
                version=version,
                type=ComponentType.LIBRARY,
                purl=PackageURL("pypi", name=name, version=version),
                bom_ref=f"pkg:pypi/{name}@{version}",
                licenses=[DisjunctiveLicense(name=license_)] if license_ else [],
                properties=[Property(name="wardround:files-sha256", value=files)] if files else [],
            )
        )
        pinned.append(f"{name}@{version} {files}")
    bom.metadata.timestamp = now
    root = Component(
        name=f"site agent of {site}", version=__version__, type=ComponentType.APPLICATION, bom_ref="site-agent"
    )
    bom.metadata.component = root
    bom.register_dependency(root, bom.components)
    bom.serial_number = uuid.uuid5(NAMESPACE, "\n".join((site, now.isoformat(), *sorted(pinned))))
    text = JsonV1Dot6(bom).output_as_string(indent=1)
    try:
        fault = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    except MissingOptionalDependencyException:
        raise NeedsPerson("what checks a bill of software by its schema is not installed here", hint=HINT) from None
    if fault is not None:
        raise BadData("the bill of software is not CycloneDX 1.6 by its schema", hint="tell the developers")
    return text.encode() + b"\n"


def _installed() -> list[metadata.Distribution]:
    """Each distribution once, by name: the first that Python would find."""
    found: dict[str, metadata.Distribution] = {}
    for one in metadata.distributions():
        if one.metadata.get_all("Name"):
            found.setdefault(normalized(one.name), one)
    return [found[name] for name in sorted(found)]


def _license(found: metadata.Distribution) -> str:
    """As its metadata names it in one line; "" where they do not."""
    about = found.metadata
    given = [text for key in ("License-Expression", "License") for text in about.get_all(key) or () if text]
    text = given[0] if given else ""
    named = text if "\n" not in text and len(text) <= LONGEST_LICENSE else ""
    classifiers = [one.rpartition(" :: ")[2] for one in about.get_all("Classifier") or () if "License" in one]
    return named or ", ".join(classifiers)
