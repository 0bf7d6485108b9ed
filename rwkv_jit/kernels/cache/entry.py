"""What is stored of a kernel, and under which key.

An entry is `magic, schema, length of the manifest, manifest (JSON), cubin, SHA-256 of all before`. Nothing volatile
goes in: equal kernels are equal bytes.
"""

from __future__ import annotations

import json
import re
import struct
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from typing import Any

from rwkv_jit.kernels.template import Rendered

SCHEMA = 1
_MAGIC = b"rwkvjit\0"
_HEAD = struct.Struct("<8sII")
_CHECKSUM_BYTES = 32
_MANIFEST_BYTES = 1 << 20  # at most
_ELF_BYTES = 64  # of its head
_EM_CUDA = 190
_ARCH = re.compile(r"(sm|compute)_[0-9]{1,4}[a-z]?")
NEWEST_THAT_ALL_KNOW = 90  # of the architectures, every NVRTC since the oldest; newer GPUs may get PTX of an older one
_FORMS = {  # of the texts that every manifest has
    "key": re.compile("[0-9a-f]{64}"),
    "target": _ARCH,
    "name": re.compile(r"[^/\0]+"),
    "arch": _ARCH,
    "compiler": re.compile("[ -~]+"),
}


@dataclass(frozen=True)
class Resources:
    """What one kernel takes of a multiprocessor. Zeros where the driver compiles it from PTX."""

    registers: int = 0
    spill_bytes: int = 0
    shared_bytes: int = 0


_RESOURCES = {field.name for field in fields(Resources)}


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
    """Read an entry back, with its manifest; ValueError if it is not intact, or not that of the key `digest`."""
    end = len(data) - _CHECKSUM_BYTES
    if end < _HEAD.size or sha256(memoryview(data)[:end]).digest() != data[end:]:
        raise ValueError("damaged")
    magic, schema, length = _HEAD.unpack_from(data)
    if magic != _MAGIC or schema != SCHEMA:
        raise ValueError("of another format")
    if length > min(_MANIFEST_BYTES, end - _HEAD.size):
        raise ValueError("damaged (its manifest is too long)")
    try:
        manifest = json.loads(data[_HEAD.size : _HEAD.size + length])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"damaged ({error})") from error
    fault = _fault(manifest)
    if fault:
        raise ValueError(f"damaged ({fault})")
    if digest is not None and manifest["key"] != digest:
        raise ValueError("another kernel's")
    image = data[_HEAD.size + length : end]
    fault = _fault_of_image(image, manifest["target"], manifest["arch"])
    if fault:
        raise ValueError(f"damaged ({fault})")
    resources = {kernel: Resources(**used) for kernel, used in manifest["resources"].items()}
    return Compiled(image, manifest["target"], resources), manifest


def _fault(manifest: Any) -> str:
    """Return what is wrong with a manifest, or an empty string: nothing nests deeper in it than one that was packed."""
    if not isinstance(manifest, dict):
        return "its manifest is no object"
    for field, form in _FORMS.items():
        if not isinstance(manifest.get(field), str) or not form.fullmatch(manifest[field]):
            return f"no {field}"
    resources, parameters = manifest.get("resources"), manifest.get("parameters", {})
    if not isinstance(resources, dict) or not all(map(_is_resources, resources.values())):
        return "no resources"
    if not isinstance(parameters, dict) or not all(map(_is_parameter, parameters.values())):
        return "no parameters"
    others = manifest.keys() - {*_FORMS, "resources", "parameters"}
    return f"unknown {min(others)}" if others else ""


def _fault_of_image(image: bytes, target: str, arch: str) -> str:
    """Return what is wrong with machine code or PTX by its head, or an empty string."""
    number, own = (int(re.sub(r"\D", "", name)) for name in (target, arch))
    is_ptx = target.startswith("compute_")
    if target != arch and not (is_ptx and max(number, NEWEST_THAT_ALL_KNOW) < own):
        return f"{target} does not serve {arch}"
    if is_ptx:
        names = target.replace("compute_", "sm_").encode()
        return "" if re.search(rb"^\.target %s\b" % names, image, re.MULTILINE) else f"no PTX for {target}"
    if len(image) < _ELF_BYTES or not image.startswith(b"\x7fELF\2\1") or elf_bytes(image) != len(image):
        return "no cubin"
    abi, machine, flags = struct.unpack_from("<8xB9xH28xI", image)
    made_for = {7: flags & 255, 8: flags >> 8 & 255}.get(abi, number)
    return "" if (machine, made_for) == (_EM_CUDA, number) else f"no cubin for {target}"


def elf_bytes(image: bytes) -> int:
    """Return how many bytes an ELF file has by its head: NVRTC writes its tables last."""
    sections, segments = struct.unpack_from("<40xQ10xHH", image), struct.unpack_from("<32xQ14xHH", image)
    return int(max(offset + size * count for offset, size, count in (sections, segments)))


def _is_resources(used: Any) -> bool:
    if not isinstance(used, dict) or not used.keys() <= _RESOURCES:
        return False
    return all(type(number) is int and 0 <= number < 2**31 for number in used.values())


def _is_parameter(value: Any) -> bool:
    return value.isidentifier() if isinstance(value, str) else isinstance(value, (bool, int, float))


def check_name(name: str, manifest: dict[str, Any]) -> None:
    """Check that an entry lies where its manifest says. Raises ValueError where it is another kernel's."""
    if name != file_name(manifest["name"], manifest["arch"], manifest["key"]):
        raise ValueError("another kernel's")
