"""The on-disk cache: one file per cubin, in one folder per architecture.

An entry is `magic, schema, length of the manifest, manifest (JSON), cubin, SHA-256 of all before`. Anything that
does not read back exactly so is a miss, and is replaced by the next compile.
"""

from __future__ import annotations

import json
import os
import struct
import tempfile
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

from rwkv_jit import env, stats
from rwkv_jit.compiler import Compiled, Resources
from rwkv_jit.template import Rendered

SCHEMA = 1
_MAGIC = b"rwkvjit\0"
_HEAD = struct.Struct("<8sII")


def key(rendered: Rendered, options: tuple[str, ...], arch: str, compiler: str) -> str:
    """Return the digest of everything that decides the machine code; each field with its length, in fixed order."""
    digest = sha256()
    headers = [part for header in rendered.headers for part in header]
    sizes = f"{SCHEMA} {len(headers)} {len(options)}"
    for field in (sizes, rendered.name, rendered.source, *headers, *options, arch, compiler):
        data = field.encode()
        digest.update(struct.pack("<Q", len(data)))
        digest.update(data)
    return digest.hexdigest()


def _path(name: str, arch: str, digest: str) -> Path:
    return env.cache_dir() / arch / f"{name}-{digest[:40]}.cubin"


def pack(digest: str, compiled: Compiled, about: dict[str, Any]) -> bytes:
    """Return the bytes of an entry. Nothing volatile goes in: equal inputs give equal files."""
    resources = {kernel: asdict(used) for kernel, used in compiled.resources.items()}
    manifest = {"key": digest, "target": compiled.target, "resources": resources, **about}
    text = json.dumps(manifest, sort_keys=True).encode()
    body = _HEAD.pack(_MAGIC, SCHEMA, len(text)) + text + compiled.image
    return body + sha256(body).digest()


def unpack(data: bytes, digest: str) -> Compiled:
    """Read an entry back.

    Raises
    ------
    ValueError
        The bytes are not an intact entry for `digest`.
    """
    body, checksum = data[:-32], data[-32:]
    if len(data) < _HEAD.size + 32 or sha256(body).digest() != checksum:
        raise ValueError("damaged")
    magic, schema, length = _HEAD.unpack_from(body)
    if magic != _MAGIC or schema != SCHEMA:
        raise ValueError("of another format")
    manifest = json.loads(body[_HEAD.size : _HEAD.size + length])
    if manifest["key"] != digest:
        raise ValueError("another kernel's")
    resources = {kernel: Resources(**used) for kernel, used in manifest["resources"].items()}
    return Compiled(body[_HEAD.size + length :], manifest["target"], resources)


def get(name: str, arch: str, digest: str) -> Compiled | None:
    """Return a stored kernel, or None."""
    path = _path(name, arch, digest)
    try:
        data = path.read_bytes()
    except OSError:
        return None
    try:
        return unpack(data, digest)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        stats.say_once(f"cache entry {path} is {error}: compiling again", key=str(path))
        return None


def put(name: str, arch: str, digest: str, compiled: Compiled, about: dict[str, Any]) -> None:
    """Publish a kernel: readers see the whole file or none. A cache that cannot be written costs one warning."""
    path = _path(name, arch, digest)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(pack(digest, compiled, about))
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        stats.say_once(f"kernels are not kept: {path.parent} cannot be written ({error})", key="unwritable")


def entries() -> list[Path]:
    """Return the files of all stored kernels."""
    return sorted(env.cache_dir().glob("*/*.cubin"))


def clear() -> int:
    """Delete all stored kernels and return how many there were; nothing else in the folder is touched."""
    found = entries()
    for path in found:
        path.unlink(missing_ok=True)
    return len(found)
