"""Rendering: the exact text, what belongs to it, and what is refused."""

import re

import pytest

import rwkv_jit
from rwkv_jit.kernels import template

PARAMETERS = {
    "HEAD_SIZE": 48, "VALUE_SIZE": 40, "NUM_THREADS": 64, "T_IO": "bf16", "T_W": "fp32", "T_STATE": "fp16",
    "DECAY": "sigmoid", "STATE_LAYOUT": "kv",
}  # fmt: skip
HEAD = """\
#include "types.cuh"
constexpr auto DECAY = Decay::sigmoid;
constexpr int HEAD_SIZE = 48;
constexpr int NUM_THREADS = 64;
constexpr auto STATE_LAYOUT = StateLayout::kv;
using T_IO = bf16;
using T_STATE = fp16;
using T_W = fp32;
constexpr int VALUE_SIZE = 40;
#line 1 "wkv7_recurrent_forward.cu"
"""


def render(name, parameters):
    return template.library(name).render(parameters)


def test_rendering_is_sorted_typed_parameters_above_the_unchanged_template():
    rendered = render("wkv7_recurrent_forward", PARAMETERS)
    body = template.path_of("wkv7_recurrent_forward.cu").read_text(encoding="utf-8")
    assert rendered.name == "wkv7_recurrent_forward"
    assert rendered.source == HEAD + body
    assert render("wkv7_recurrent_forward", dict(reversed(PARAMETERS.items()))) == rendered


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (True, "bool X = true"),
        (False, "bool X = false"),
        (-(2**31), "int X = -2147483648"),
        (2**31 - 1, "int X = 2147483647"),
        (0, "int X = 0"),
        (0.5, "float X = 0.5f"),
        (-0.0, "float X = -0.0f"),
        (1e20, "float X = 1e+20f"),
        (1e-45, "float X = 1e-45f"),
        (3.4028234663852886e38, "float X = 3.4028234663852886e+38f"),
        (-3.4028234663852886e38, "float X = -3.4028234663852886e+38f"),
    ],
)
def test_value_is_written_with_its_type(value, line, own_templates):
    (own_templates / "tiny.cu").write_text("auto y = X;", encoding="utf-8")
    wanted = f'#include "types.cuh"\nconstexpr {line};\n#line 1 "tiny.cu"\nauto y = X;'
    assert render("tiny", {"X": value}).source == wanted


@pytest.mark.parametrize("name", template.names())
def test_headers_are_the_texts_the_template_includes_directly_and_indirectly(name):
    wanted, texts = {"types.cuh"}, [template.library(name).body]
    while texts:
        included = set(re.findall(r'^#include "(.*)"$', texts.pop(), flags=re.MULTILINE)) - wanted
        wanted |= included
        texts += [template.path_of(header).read_text(encoding="utf-8") for header in included]
    assert render(name, {}).headers == tuple(
        (header, template.path_of(header).read_text(encoding="utf-8")) for header in sorted(wanted)
    )


def test_headers_that_include_each_other_are_read_once(own_templates):
    (own_templates / "one.cuh").write_text('#pragma once\n#include "two.cuh"\n', encoding="utf-8")
    (own_templates / "two.cuh").write_text('#pragma once\n  #include "one.cuh"\n', encoding="utf-8")
    (own_templates / "tiny.cu").write_text('#include "two.cuh"\n', encoding="utf-8")
    assert [name for name, _ in render("tiny", {}).headers] == ["one.cuh", "two.cuh", "types.cuh"]


def test_unknown_template_names_those_there_are():
    with pytest.raises(rwkv_jit.UnsupportedConfigError, match="no kernel template 'wkv8'.*gla_recurrent_backward"):
        template.library("wkv8")


TEXT_WITH_NAMES = """
#define MACRO 3
// a comment: float lower, higher;
struct Row { float weight; };
constexpr int TWICE = 2 * SIZE;
template <int COUNT> __device__ float sum(const float* __restrict__ x, float *y) {
    static_assert(COUNT > SIZE, "more than int lower, here");
    int row = threadIdx.x;
    for (auto each : list) row += scale * each;
    return lower;
}
"""


@pytest.mark.parametrize("name", ["SIZE", "COUNT", "scale", "lower"])
def test_name_that_the_text_uses_is_a_parameter(name, own_templates):
    (own_templates / "tiny.cu").write_text(TEXT_WITH_NAMES, encoding="utf-8")
    template.library("tiny").check({name: 1})


@pytest.mark.parametrize("name", ["MACRO", "TWICE", "weight", "sum", "x", "y", "row", "each", "z" * 10**5])
def test_name_that_the_text_defines_is_no_parameter(name, own_templates):
    (own_templates / "tiny.cu").write_text(TEXT_WITH_NAMES, encoding="utf-8")
    with pytest.raises(ValueError, match=f"^template tiny has no parameter {name[:200]}") as caught:
        template.library("tiny").check({name: 1})
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("parameter", "value", "error", "message"),
    [
        ("T_IO", "fp64", ValueError, "T_IO: expected one of fp16, bf16, fp32, got 'fp64'"),
        ("T_IO", 16, ValueError, "T_IO: expected one of fp16, bf16, fp32, got 16"),
        ("HEAD_SIZE", 2**31, ValueError, "HEAD_SIZE: expected a 32-bit integer, got 2147483648"),
        ("HEAD_SIZE", -(2**31) - 1, ValueError, "HEAD_SIZE: expected a 32-bit integer"),
        ("HEAD_SIZE", None, TypeError, "HEAD_SIZE: expected an int, a float, a bool or an identifier, got None"),
        ("HEAD_SIZE", (1,), TypeError, "HEAD_SIZE: expected an int, a float, a bool or an identifier, got .1,."),
        ("SCALE", float("nan"), ValueError, "SCALE: expected a finite 32-bit float, got nan"),
        ("SCALE", float("-inf"), ValueError, "SCALE: expected a finite 32-bit float, got -inf"),
        ("SCALE", 3.41e38, ValueError, "SCALE: expected a finite 32-bit float, got 3.41e.38"),
        ("DECAY", "raw; int x", TypeError, "DECAY: expected an int, a float, a bool or an identifier"),
        ("DECAY", "", TypeError, "DECAY: expected an int, a float, a bool or an identifier, got ''"),
        ("DECAY", "-" * 10**5, TypeError, r"identifier, got '-{199}\.\.\. .100002 characters.$"),
        pytest.param(
            "HEAD_SIZE",
            10**5000,
            ValueError,
            "a 32-bit integer, got a value of type int that cannot be printed$",
            id="long",
        ),
    ],
)
def test_value_that_cannot_be_a_parameter(parameter, value, error, message):
    with pytest.raises(error, match=message):
        render("wkv7_recurrent_forward", {parameter: value})


# ---- any template ------------------------------------------------------------------------------------------------


def test_template_of_ones_own_has_its_headers_beside_it_or_from_the_library(tmp_path):
    (tmp_path / "tile.cuh").write_text('#include "parts/deep.cuh"\n', encoding="utf-8")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "deep.cuh").write_text("// é\n", encoding="utf-8")
    (tmp_path / "own.cu").write_text('#include "tile.cuh"\n#include "column_sums.cuh"\n', encoding="utf-8")
    read = template.read(tmp_path / "own.cu")
    assert read.name == "own"
    assert read.body == '#include "tile.cuh"\n#include "column_sums.cuh"\n'
    assert dict(read.headers) == {
        "tile.cuh": '#include "parts/deep.cuh"\n',
        "parts/deep.cuh": "// é\n",
        "column_sums.cuh": template.path_of("column_sums.cuh").read_text(encoding="utf-8"),
        "types.cuh": template.path_of("types.cuh").read_text(encoding="utf-8"),
    }


def test_missing_header_is_named_with_the_file_that_includes_it(tmp_path):
    (tmp_path / "own.cu").write_text('#include "one.cuh"\n', encoding="utf-8")
    (tmp_path / "one.cuh").write_text('  #  include "missing.cuh"\n', encoding="utf-8")
    with pytest.raises(FileNotFoundError, match='^"missing.cuh", which one.cuh includes, is neither beside '):
        template.read(tmp_path / "own.cu")


FOLLOWED = {
    "no blank": '#include"h.cuh"',
    "blanks": '  #  include   "h.cuh"',
    "tabs": '#\tinclude\t"h.cuh"',
    "a comment before": '/* a */ #include "h.cuh"',
    "the end of a comment before": '/* a\n b */ #include "h.cuh"',
    "a comment between": '#/* a */include/* b\n */"h.cuh"',
    "a digraph": '%:include "h.cuh"',
    "a continued line": '#include \\\n"h.cuh"',
    "a continued word": '#inc\\\nlude "h.cuh"',
    "a continued word of a digraph": '%:inc\\\nlude "h.cuh"',
    "a continued word behind a comment": '#/* */ inc\\\nlude "h.cuh"',
    "a continued name": '#include "h.c\\\nuh"',
    "text behind": '#include "h.cuh" // "x.cuh"',
    "form feed": '#\x0b include\x0c"h.cuh"',
    "a raw string before": 'auto x = R"a(\n")a";\n#include "h.cuh"',
    "a quote in a character before": "char x = '\"';\n#include \"h.cuh\" // '\"'",
    "a comment's end in a string before": 'auto x = "/*";\n#include "h.cuh"\nauto y = "*/";',
    "a comment that ends in a quote before": '// "\n#include "h.cuh"',
}


@pytest.mark.parametrize("spelling", FOLLOWED)
def test_include_is_followed_however_it_is_spelled(spelling, tmp_path):
    (tmp_path / "h.cuh").write_text("// here\n", encoding="utf-8")
    (tmp_path / "own.cu").write_text(FOLLOWED[spelling] + "\nint x;\n", encoding="utf-8")
    assert [name for name, _ in template.read(tmp_path / "own.cu").headers] == ["h.cuh", "types.cuh"]


REFUSED = {
    "a macro": ('int x;\n#define H "h.cuh"\n#include H', 3, "#include H"),
    "a macro like a string": ('#include L"h.cuh"', 1, "#include L"),
    "the next one": ('#include_next "h.cuh"', 1, "#include_next"),
    "an absolute name": ("\n\n#include </h.cuh>", 3, "#include </h.cuh>"),
    "an absolute name of Windows": ("#include <C:/h.cuh>", 1, "#include <C:/h.cuh>"),
    "a question": ('/* a\n */ \\\n\n#if __has_include("h.cuh")\n#endif', 4, "__has_include"),
    "a question in a macro": ("#define HAS __has_include", 1, "__has_include"),
    "an import": ('#import "h.cuh"', 1, "#import"),
    "bytes": ('#embed "h.cuh"', 1, "#embed"),
    "no name": ("#include", 1, "#include"),
    "a trigraph": ("??=include H", 1, "??=include H"),
    "a continued macro": ("#include \\\n    H", 1, "#include     H"),
    "a long one": ("#include H" + 10**5 * "x", 1, "#include Hxxx"),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("file", ["own.cu", "h.cuh"])
def test_what_may_read_a_file_that_the_cache_cannot_see_is_refused(what, file, tmp_path):
    text, line, found = REFUSED[what]
    (tmp_path / "own.cu").write_text('#include "h.cuh"\n', encoding="utf-8")
    (tmp_path / "h.cuh").write_text("", encoding="utf-8")
    (tmp_path / file).write_text(text + "\nint x;\n", encoding="utf-8")
    with pytest.raises(ValueError, match='; include headers as #include "NAME", with the name itself in ') as caught:
        template.read(tmp_path / "own.cu")
    assert str(caught.value).startswith(f"{file}, line {line}: '{found}")
    assert len(str(caught.value)) < 400


NO_INCLUDES = {
    "a comment": "// #include H, and __has_include(H)",
    "a continued comment": "// a \\\n#include H",
    "lines of a comment": '/*\n#include H\n#include "missing.cuh"\n*/',
    "a string": 'auto x = "\\\n#include H";',
    "a raw string": 'auto x = R"(\n#include H\n)";',
    "another word": "int include = 1, embed, important; // included, imported, embedded\n#pragma unroll",
    "behind other text": '// #include "missing.cuh"\nint x; #include "tile.cuh"',
    "what NVRTC was given": "#include <types.cuh>\n# include<sub/h.cuh>",
}


@pytest.mark.parametrize("what", NO_INCLUDES)
def test_what_reads_no_file_is_left_alone(what, tmp_path):
    (tmp_path / "own.cu").write_text(NO_INCLUDES[what] + "\nint x;\n", encoding="utf-8")
    assert [name for name, _ in template.read(tmp_path / "own.cu").headers] == ["types.cuh"]


@pytest.mark.parametrize(
    ("header", "error", "message"),
    [
        ("a\0b", ValueError, r"^'a\\x00b', which own.cu includes, cannot be read: embedded null"),
        ("x" * 5000, OSError, r'^"x{200}... .5000 characters.", which own.cu includes, cannot be read: File name too'),
        ("folder", OSError, '^"folder", which own.cu includes, (is neither|cannot be read)'),
        ("latin.cuh", ValueError, '^"latin.cuh", which own.cu includes, is not text in UTF-8'),
    ],
    ids=["NUL", "long", "a folder", "no text"],
)
def test_header_that_cannot_be_read_is_named_with_the_file_that_includes_it(header, error, message, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "latin.cuh").write_bytes(b"// \xe9\n")
    (tmp_path / "own.cu").write_text(f'#include "{header}"\n', encoding="utf-8")
    with pytest.raises(error, match=message):
        template.read(tmp_path / "own.cu")


def test_name_of_a_file_is_no_code(tmp_path):
    path = tmp_path / '"; evil(\n\\ é + b-c.d.cu'
    path.write_text("int x;", encoding="utf-8")
    read = template.read(path)
    assert read.name == "__ evil___ é + b-c.d"
    assert read.render({}).source.endswith('#line 1 "__ evil___ é + b-c.d.cu"\nint x;')


def test_template_is_read_anew_and_those_of_the_library_once(own_templates):
    path = own_templates / "tiny.cu"
    path.write_text("int x;", encoding="utf-8")
    first, own = template.library("tiny"), template.read(path)
    path.write_text("int y;", encoding="utf-8")
    assert template.library("tiny") is first
    assert template.read(path).body == "int y;"
    assert own != template.read(path)


def test_names_of_files_are_unique_in_all_folders():
    files = [path.name for path in template.directory().rglob("*.cu*")]
    assert len(files) == len(set(files))
    assert all(template.path_of(name).name == name and template.path_of(name).is_file() for name in files)


def test_template_and_header_are_found_in_any_folder(own_templates):
    (own_templates / "one_more").mkdir()
    (own_templates / "one_more" / "tiny.cu").write_text('#include "small.cuh"\n', encoding="utf-8")
    (own_templates / "small.cuh").write_text("// here\n", encoding="utf-8")
    assert "tiny" in template.names()
    assert [name for name, _ in template.library("tiny").headers] == ["small.cuh", "types.cuh"]


def test_templates_lie_inside_the_package_when_installed_and_beside_it_in_a_checkout(tmp_path, monkeypatch):
    package = tmp_path / "rwkv_jit"
    beside = tmp_path / "kernel_templates"
    beside.mkdir()
    monkeypatch.setattr(template, "__file__", str(package / "kernels" / "template.py"))
    assert template.directory() == beside
    inside = package / "kernel_templates"
    inside.mkdir(parents=True)
    assert template.directory() == inside
