"""Rendering: the exact text, what belongs to it, and what is refused."""

import pytest

import rwkv_jit
from rwkv_jit import template

PARAMETERS = {
    "HEAD_SIZE": 48,
    "VALUE_SIZE": 40,
    "CHUNK_LEN": 8,
    "NUM_THREADS": 64,
    "LANES_PER_ROW": 4,
    "ROWS_PER_THREAD": 2,
    "T_IO": "bf16",
    "T_W": "fp32",
    "T_STATE": "fp16",
    "DECAY": "sigmoid",
    "STATE_LAYOUT": "kv",
}
HEAD = """\
#include "types.cuh"
constexpr int CHUNK_LEN = 8;
constexpr auto DECAY = Decay::sigmoid;
constexpr int HEAD_SIZE = 48;
constexpr int LANES_PER_ROW = 4;
constexpr int NUM_THREADS = 64;
constexpr int ROWS_PER_THREAD = 2;
constexpr auto STATE_LAYOUT = StateLayout::kv;
using T_IO = bf16;
using T_STATE = fp16;
using T_W = fp32;
constexpr int VALUE_SIZE = 40;
#line 1 "wkv7_recurrent_forward.cu"
"""


def test_rendering_is_sorted_typed_parameters_above_the_unchanged_template():
    rendered = template.render("wkv7_recurrent_forward", PARAMETERS)
    body = (template.directory() / "wkv7_recurrent_forward.cu").read_text(encoding="utf-8")
    assert rendered.name == "wkv7_recurrent_forward"
    assert rendered.source == HEAD + body


def test_order_of_the_parameters_does_not_change_the_text():
    backwards = dict(reversed(PARAMETERS.items()))
    assert template.render("wkv7_recurrent_forward", backwards) == template.render("wkv7_recurrent_forward", PARAMETERS)


def test_bool_is_a_bool_and_not_an_int(own_templates):
    (own_templates / "tiny.cu").write_text("int x = FLAG && OTHER;", encoding="utf-8")
    rendered = template.render("tiny", {"OTHER": False, "FLAG": True})
    head, body = rendered.source.split('#line 1 "tiny.cu"\n')
    assert head == '#include "types.cuh"\nconstexpr bool FLAG = true;\nconstexpr bool OTHER = false;\n'
    assert body == "int x = FLAG && OTHER;"


@pytest.mark.parametrize("value", [-(2**31), 2**31 - 1, 0])
def test_int_takes_the_whole_32_bit_range(own_templates, value):
    (own_templates / "tiny.cu").write_text("int x = SIZE;", encoding="utf-8")
    assert f"constexpr int SIZE = {value};\n" in template.render("tiny", {"SIZE": value}).source


@pytest.mark.parametrize(
    ("name", "headers"),
    [
        ("wkv6_recurrent_forward", ["tile.cuh", "types.cuh"]),
        ("wkv7_recurrent_forward", ["tile.cuh", "types.cuh"]),
        ("wkv6_recurrent_backward", ["column_sums.cuh", "tile.cuh", "types.cuh"]),
        ("wkv7_recurrent_backward", ["column_sums.cuh", "tile.cuh", "types.cuh"]),
    ],
)
def test_headers_are_the_texts_the_template_includes_directly_and_indirectly(name, headers):
    rendered = template.render(name, {})
    assert rendered.headers == tuple(
        (header, (template.directory() / header).read_text(encoding="utf-8")) for header in headers
    )


def test_headers_that_include_each_other_are_read_once(own_templates):
    (own_templates / "one.cuh").write_text('#pragma once\n#include "two.cuh"\n', encoding="utf-8")
    (own_templates / "two.cuh").write_text('#pragma once\n  #include "one.cuh"\n', encoding="utf-8")
    (own_templates / "tiny.cu").write_text('#include "two.cuh"\n', encoding="utf-8")
    assert [name for name, _ in template.render("tiny", {}).headers] == ["one.cuh", "two.cuh", "types.cuh"]


def test_unknown_template_names_those_there_are():
    with pytest.raises(rwkv_jit.UnsupportedConfigError, match="no kernel template 'wkv8'.*wkv6_recurrent_backward"):
        template.render("wkv8", {})


@pytest.mark.parametrize("parameter", ["LANES", "head_size_", "HEAD_SIZE;"])
def test_parameter_the_template_does_not_have(parameter):
    with pytest.raises(ValueError, match="template wkv7_recurrent_forward has no parameter"):
        template.check_parameters("wkv7_recurrent_forward", {parameter: 1})


def test_constant_the_template_works_out_itself_is_no_parameter(own_templates):
    (own_templates / "tiny.cu").write_text("constexpr int TWICE = 2 * SIZE;", encoding="utf-8")
    with pytest.raises(ValueError, match="template tiny has no parameter TWICE"):
        template.check_parameters("tiny", {"SIZE": 1, "TWICE": 3})


@pytest.mark.parametrize(
    ("parameter", "value", "error", "message"),
    [
        ("T_IO", "fp64", ValueError, "T_IO: expected one of fp16, bf16, fp32, got 'fp64'"),
        ("T_IO", 16, ValueError, "T_IO: expected one of fp16, bf16, fp32, got 16"),
        ("HEAD_SIZE", 2**31, ValueError, "HEAD_SIZE: expected a 32-bit integer, got 2147483648"),
        ("HEAD_SIZE", -(2**31) - 1, ValueError, "HEAD_SIZE: expected a 32-bit integer"),
        ("HEAD_SIZE", 64.0, TypeError, "HEAD_SIZE: expected an int, a bool or an identifier, got 64.0"),
        ("HEAD_SIZE", None, TypeError, "HEAD_SIZE: expected an int, a bool or an identifier, got None"),
        ("DECAY", "raw; int x", TypeError, "DECAY: expected an int, a bool or an identifier"),
        ("DECAY", "", TypeError, "DECAY: expected an int, a bool or an identifier, got ''"),
    ],
)
def test_value_that_cannot_be_a_parameter(parameter, value, error, message):
    with pytest.raises(error, match=message):
        template.render("wkv7_recurrent_forward", {parameter: value})


def test_templates_lie_inside_the_package_when_installed_and_beside_it_in_a_checkout(tmp_path, monkeypatch):
    package = tmp_path / "rwkv_jit"
    beside = tmp_path / "kernel_templates"
    package.mkdir()
    beside.mkdir()
    monkeypatch.setattr(template, "__file__", str(package / "template.py"))
    assert template.directory() == beside
    inside = package / "kernel_templates"
    inside.mkdir()
    assert template.directory() == inside


def test_templates_of_this_installation_are_found():
    assert {f"{op}_recurrent_{way}" for op in ("wkv6", "wkv7") for way in ("forward", "backward")} <= set(
        template.names()
    )
