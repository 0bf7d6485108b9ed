"""What is stored of a kernel, and under which key.

An entry is `magic, schema, length of the manifest, manifest (JSON), cubin, SHA-256 of all before`. Nothing volatile
goes in: equal kernels are equal bytes, wherever and whenever they were compiled.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

from rwkv_jit.template import Rendered

SCHEMA = 1
_MAGIC = b"rwkvjit\0"
_HEAD = struct.Struct("<8sII")
_CHECKSUM_BYTES = 32
_TEXTS = ("key", "target", "name", "arch", "compiler")  # what every manifest has


@dataclass(frozen=True)
class Resources:
    """What one kernel takes of a multiprocessor. Zeros where the driver compiles it from PTX."""

    registers: int = 0
    spill_bytes: int = 0
    shared_bytes: int = 0


@dataclass(frozen=True)
class Compiled:
    """A cubin, or PTX for the driver, and the resources of each kernel in it."""

    image: bytes
    target: str
    resources: dict[str, Resources]
    seconds: float = 0.0


def key(rendered: Rendered, options: tuple[str, ...], arch: str, compiler: str) -> str:
    """Return the digest of everything that decides the machine code; each field with its length, in fixed order."""
    digest = sha256()
    headers = [part for header in rendered.headers for part in header]
    sizes = f"{SCHEMA} {len(headers)} {len(options)}"
    for field in (sizes, rendered.name, rendered.source, *headers, *options, arch, compiler):
        data = field.encode("utf-8", "surrogatepass")
        digest.update(struct.pack("<Q", len(data)))
        digest.update(data)
    return digest.hexdigest()


def file_name(name: str, arch: str, digest: str) -> str:
    """Return where an entry lies in a cache directory or a bundle."""
    return f"{arch}/{name}-{digest[:40]}.cubin"


def pack(digest: str, compiled: Compiled, about: dict[str, Any]) -> bytes:
    """Return the bytes of an entry."""
    resources = {kernel: asdict(used) for kernel, used in compiled.resources.items()}
    manifest = {"key": digest, "target": compiled.target, "resources": resources, **about}
    text = json.dumps(manifest, sort_keys=True).encode()
    body = _HEAD.pack(_MAGIC, SCHEMA, len(text)) + text + compiled.image
    return body + sha256(body).digest()


def unpack(data: bytes, digest: str | None = None) -> tuple[Compiled, dict[str, Any]]:
    """Read an entry back, with its manifest; `digest` is the key it must have, if one is known.

    Raises
    ------
    ValueError
        The bytes are not an intact entry, or another kernel's.
    """
    end = len(data) - _CHECKSUM_BYTES
    if end < _HEAD.size or sha256(memoryview(data)[:end]).digest() != data[end:]:
        raise ValueError("damaged")
    magic, schema, length = _HEAD.unpack_from(data)
    if magic != _MAGIC or schema != SCHEMA:
        raise ValueError("of another format")
    try:
        manifest = json.loads(data[_HEAD.size : _HEAD.size + length])
        resources = {kernel: Resources(**used) for kernel, used in manifest["resources"].items()}
        missing = [field for field in _TEXTS if not isinstance(manifest.get(field), str)]
        if missing:
            raise ValueError(f"no {missing[0]}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"damaged ({error!r})") from error
    if digest is not None and manifest["key"] != digest:
        raise ValueError("another kernel's")
    return Compiled(data[_HEAD.size + length : end], manifest["target"], resources), manifest


def check_name(name: str, manifest: dict[str, Any]) -> None:
    """Check that an entry lies where its manifest says.

    Raises
    ------
    ValueError
        It is another kernel's.
    """
    if name != file_name(manifest["name"], manifest["arch"], manifest["key"]):
        raise ValueError("another kernel's")
