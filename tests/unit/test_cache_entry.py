"""What the key covers, what an entry holds, and that no other bytes are taken for one."""

import json
import random
import shutil
import struct
from hashlib import sha256
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from images import image

from rwkv_jit.kernels import cache, template
from rwkv_jit.kernels.cache import Compiled, Resources, entry
from rwkv_jit.kernels.template import Rendered

RENDERED = Rendered("wkv7_recurrent_forward", "int x;\n", (("a.cuh", "// a"), ("b.cuh", "// é")))
OPTIONS = ("-arch=sm_90", "-std=c++17", "--no-cache")
ARCH, COMPILER = "sm_90", "12.9 0123abcd"

DIGEST = sha256(b"a key").hexdigest()
ABOUT = {"name": "wkv7_recurrent_forward", "arch": "sm_90", "compiler": COMPILER, "parameters": {"HEAD_SIZE": 48}}
COMPILED = Compiled(image(b"machine code\0"), "sm_90", {"wkv7_forward": Resources(128, 16, 4096)}, 0.5)
ENTRY = cache.pack(DIGEST, COMPILED, ABOUT)
MANIFEST = {"key": DIGEST, "target": "sm_90", "resources": {}, **ABOUT}


def key(rendered=RENDERED, options=OPTIONS, arch=ARCH, compiler=COMPILER):
    return cache.key(rendered, options, arch, compiler)


def same(found):
    """The time it took is not part of an entry."""
    return (found.image, found.target, found.resources) == (COMPILED.image, COMPILED.target, COMPILED.resources)


def seal(body):
    """Add a right checksum to whatever it is."""
    return body + sha256(body).digest()


CODE = image(b"code")


def sealed(manifest, code=CODE, magic=b"rwkvjit\0", schema=entry.SCHEMA):
    text = json.dumps(manifest).encode()
    return seal(struct.pack("<8sII", magic, schema, len(text)) + text + code)


def sealed_text(text):
    return seal(struct.pack("<8sII", b"rwkvjit\0", entry.SCHEMA, len(text)) + text + image(b"code"))


def of_resources(**used):
    return sealed({**MANIFEST, "resources": {"f": {"registers": 1, "spill_bytes": 0, "shared_bytes": 0, **used}}})


def without(field):
    return {name: value for name, value in MANIFEST.items() if name != field}


# ---- the key -----------------------------------------------------------------------------------------------------


LONG = Rendered("tiny", "x" * 100_000, ())
GOLDEN = {
    "b181093e7c62221b94263fdcda991e0a551d99ccb229efd244a8828bfe14aae2": (RENDERED, OPTIONS, ARCH, COMPILER),
    "4c5494b648d2539b88662a4e2dc9c27804dd79ab69f3ee688b75b02e3f52c018": (RENDERED, OPTIONS, ARCH, ""),
    "fd32498f4c07a3966ee99faaa6325d0aeffe91e8a98a52499425cec09044cad6": (Rendered("", "", ()), (), "", ""),
    "d849b60956a68f238153f7665d455d2e05033309902564f901e6ca7760b8129f": (LONG, ("-a",), "compute_80", "13.0 é"),
}


@pytest.mark.parametrize("golden", GOLDEN)
def test_key_of_a_known_request(golden):
    assert cache.key(*GOLDEN[golden]) == golden


def test_no_two_requests_have_one_key():
    """Of texts of one letter or two, which could move from a field to its neighbour."""
    texts, options = ("", "a", "aa"), ((), ("a",), ("aa",), ("a", "a"))
    headers = ((), (("a", "a"),), (("", "aa"),), (("aa", ""),), (("a", "a"), ("", "a")), (("", "a"), ("a", "a")))
    requests = [
        (Rendered(*of_template), *others)
        for of_template in product(texts, texts, headers)
        for others in product(options, texts, texts)
    ]
    assert len({cache.key(*request) for request in requests}) == len(requests) == 3**4 * 6 * 4


def test_key_changes_with_the_schema(monkeypatch):
    before = key()
    monkeypatch.setattr(entry, "SCHEMA", entry.SCHEMA + 1)
    assert key() != before


def test_key_of_text_that_is_not_unicode():
    """Names of files may hold such bytes; two of them are two keys."""
    names = [b"caf\xe9".decode(errors="surrogateescape"), b"caf\xe8".decode(errors="surrogateescape")]
    keys = {key(rendered=Rendered(name, "", ())) for name in names} | {key(compiler=name) for name in names}
    assert len(keys) == 4


def test_key_depends_on_nothing_around_the_process(child, tmp_path):
    code = """
import locale
from rwkv_jit.kernels import cache, compiler, template
try:
    locale.setlocale(locale.LC_ALL, "")
except locale.Error:
    pass
rendered = template.library("wkv7_recurrent_forward").render({"T_IO": "bf16", "HEAD_SIZE": 48, "DECAY": "raw"})
print(template.directory())
print(cache.key(rendered, compiler.key_options("sm_90"), "sm_90", "12.9 \\u00e9"))
"""
    copy = tmp_path / "another installation"
    shutil.copytree(Path(template.__file__).parents[1], copy / "rwkv_jit")
    shutil.copytree(template.directory(), copy / "kernel_templates")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    one_place, one = child(code, env={"PYTHONHASHSEED": "1"}).stdout.splitlines()
    other_place, other = child(
        code,
        cwd=elsewhere,
        env={"PYTHONHASHSEED": "2", "HOME": str(elsewhere), "LC_ALL": "tr_TR.UTF-8", "LANG": "C", "TZ": "Asia/Tokyo",
             "PYTHONUTF8": "0", "RWKVJIT_CACHE_DIR": str(elsewhere), "PYTHONPATH": str(copy)},
    ).stdout.splitlines()  # fmt: skip
    assert Path(other_place).is_relative_to(copy)
    assert not Path(one_place).is_relative_to(copy)
    assert len(one) == 64
    assert one == other


# ---- an entry ----------------------------------------------------------------------------------------------------


def test_entry_reads_back_as_it_was_written():
    compiled, manifest = entry.unpack(ENTRY, DIGEST)
    assert same(compiled)
    assert {name: manifest[name] for name in ABOUT} == ABOUT
    assert same(entry.unpack(ENTRY)[0])


def test_equal_kernels_give_equal_bytes_whatever_compiling_took():
    slower = Compiled(COMPILED.image, COMPILED.target, COMPILED.resources, 9.0)
    assert cache.pack(DIGEST, slower, dict(reversed(ABOUT.items()))) == ENTRY
    assert sha256(ENTRY).hexdigest() == "290647d31510a1e8eef92cd870303ae75f182c6ba13c4fde9e57d242dbf6aa41"


FAULTS = {
    "empty": (b"", "damaged"),
    "cut by one byte": (ENTRY[:-1], "damaged"),
    "another kernel's": (cache.pack(sha256(b"another").hexdigest(), COMPILED, ABOUT), "another kernel's"),
    "another program's": (sealed(MANIFEST, magic=b"othrjit\0"), "of another format"),
    "of a later schema": (sealed(MANIFEST, schema=entry.SCHEMA + 1), "of another format"),
    "a list": (sealed([]), "damaged"),
    "resources of another kind": (sealed({**MANIFEST, "resources": []}), "damaged"),
    "unknown resource": (sealed({**MANIFEST, "resources": {"wkv7_forward": {"barriers": 1}}}), "damaged"),
    "a number for a name": (sealed({**MANIFEST, "name": 7}), "damaged"),
    "no target's name": (sealed({**MANIFEST, "target": ""}), r"damaged \(no target\)"),
    "another alphabet's digit": (sealed({**MANIFEST, "arch": "sm_9٠"}), r"damaged \(no arch\)"),
    "a name of two parts": (sealed({**MANIFEST, "name": "a/b"}), r"damaged \(no name\)"),
    "a key of another form": (sealed({**MANIFEST, "key": "0"}), r"damaged \(no key\)"),
    "compiler that cannot be printed": (sealed({**MANIFEST, "compiler": "\ud800"}), r"damaged \(no compiler\)"),
    "registers of another type": (of_resources(registers="8"), r"damaged \(no resources\)"),
    "true for a number": (of_resources(spill_bytes=True), r"damaged \(no resources\)"),
    "less than nothing": (of_resources(shared_bytes=-1), r"damaged \(no resources\)"),
    "more than there can be": (of_resources(registers=10**4000), r"damaged \(no resources\)"),
    "resources that are a list": (sealed({**MANIFEST, "resources": {"f": [1]}}), r"damaged \(no resources\)"),
    "parameters that are a list": (sealed({**MANIFEST, "parameters": [1]}), r"damaged \(no parameters\)"),
    "a list for a parameter": (sealed({**MANIFEST, "parameters": {"A": [1]}}), r"damaged \(no parameters\)"),
    "a text for a parameter": (sealed({**MANIFEST, "parameters": {"A": "\ud800"}}), r"damaged \(no parameters\)"),
    "an unknown field": (sealed({**MANIFEST, "nested": [[[]]]}), r"damaged \(unknown nested\)"),
    "nested a hundred thousand times": (sealed_text(b"[" * 100_000), "damaged"),
    "nested in a field": (sealed_text(b'{"key": ' + b'{"a":' * 100_000), "damaged"),
    "no machine code": (sealed(MANIFEST, b""), r"damaged \(no cubin\)"),
    "another machine's": (sealed(MANIFEST, CODE[:18] + b"\x3e" + CODE[19:]), r"damaged \(no cubin for sm_90\)"),
    "another GPU's": (sealed(MANIFEST, image(b"code", "sm_80")), r"damaged \(no cubin for sm_90\)"),
    "cut machine code": (sealed(MANIFEST, CODE[:-1]), r"damaged \(no cubin\)"),
    "half a head": (sealed(MANIFEST, CODE[:40]), r"damaged \(no cubin\)"),
    "more than machine code": (sealed(MANIFEST, CODE + b"?"), r"damaged \(no cubin\)"),
    "machine code for another target": (
        sealed({**MANIFEST, "target": "sm_80"}, image(b"", "sm_80")),
        r"damaged \(sm_80 does not serve sm_90\)",
    ),
    "PTX for a GPU that every compiler knows": (
        sealed({**MANIFEST, "target": "compute_80"}, image(b"", "compute_80")),
        r"damaged \(compute_80 does not serve sm_90\)",
    ),
    "PTX of a newer GPU": (
        sealed({**MANIFEST, "arch": "sm_103", "target": "compute_120"}, image(b"", "compute_120")),
        r"damaged \(compute_120 does not serve sm_103\)",
    ),
    "PTX of another GPU": (
        sealed({**MANIFEST, "arch": "compute_80", "target": "compute_80"}, image(b"", "compute_90")),
        r"damaged \(no PTX for compute_80\)",
    ),
    "no PTX": (
        sealed({**MANIFEST, "arch": "compute_80", "target": "compute_80"}, b""),
        r"damaged \(no PTX for compute_80\)",
    ),
    "a manifest longer than the entry": (seal(struct.pack("<8sII", b"rwkvjit\0", 1, 2**31) + b"{}"), "damaged"),
    **{f"no {field}": (sealed(without(field)), "damaged") for field in MANIFEST if field != "parameters"},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_entry_is_refused_with_what_it_is(fault):
    data, message = FAULTS[fault]
    with pytest.raises(ValueError, match=f"^{message}"):
        entry.unpack(data, DIGEST)


@pytest.mark.parametrize(
    ("arch", "target"),
    [("sm_90a", "sm_90a"), ("sm_120", "sm_120"), ("compute_80", "compute_80"), ("sm_103", "compute_100"),
     ("compute_130", "compute_121"), ("sm_121a", "compute_120a")],
)  # fmt: skip
def test_entry_of_what_nvrtc_makes_for_an_architecture_is_read(arch, target):
    code = image(b"code", target)
    found, _ = entry.unpack(sealed({**MANIFEST, "arch": arch, "target": target}, code), DIGEST)
    assert (found.image, found.target) == (code, target)


@settings(max_examples=300)
@given(
    edits=st.lists(
        st.tuples(st.integers(0, len(ENTRY) - 1), st.integers(0, len(ENTRY)), st.binary(max_size=40)), min_size=1
    )
)
def test_changed_entry_is_refused_or_reads_back_the_same(edits):
    data = ENTRY
    for begin, end, replacement in edits:
        data = data[:begin] + replacement + data[max(begin, end) :]
    try:
        found, _ = entry.unpack(data, DIGEST)
    except ValueError:
        return
    assert data == ENTRY
    assert same(found)


@settings(max_examples=100)
@given(data=st.binary(max_size=200))
def test_any_other_bytes_are_refused(data):
    with pytest.raises(ValueError, match="damaged|of another format|another kernel's"):
        entry.unpack(data, DIGEST)


def test_changed_entry_with_a_right_checksum_is_refused_or_has_all_its_fields():
    """A thousand changes that the checksum does not stop: nothing but ValueError comes out."""
    rng, body, refused = random.Random(0), ENTRY[:-32], 0
    head_and_manifest = len(body) - len(COMPILED.image)
    for _ in range(1000):
        data = bytearray(body)
        for _ in range(rng.choice((1, 1, 2, 8))):
            data[rng.randrange(head_and_manifest)] = rng.choice(b'\0\x7f\xff"{}[]:,0a' + bytes([rng.randrange(256)]))
        try:
            found, manifest = entry.unpack(seal(bytes(data)), DIGEST)
        except ValueError:
            refused += 1
        else:
            assert isinstance(found.image, bytes)
            assert manifest["key"] == DIGEST
    assert 500 < refused < 1000
