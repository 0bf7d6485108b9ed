"""What pyproject.toml says it takes is what tests/combinations.json says was tried."""

import importlib.util
import json
import re

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from rwkv_jit.desk import doctor
from rwkv_jit.kernels import cuda


def listed(root, name):
    """The requirements of a list in pyproject.toml, by package."""
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    (found,) = re.findall(rf"^{name} = (\[.*\])$", text, flags=re.MULTILINE)
    requirements = [Requirement(each) for each in json.loads(found)]
    return {requirement.name: requirement.specifier for requirement in requirements}


def least(specifier):
    """The lower bound, as (major, minor)."""
    (bound,) = [each.version for each in specifier if each.operator == ">="]
    return Version(bound).release[:2]


@pytest.fixture
def tried(root):
    """Results by the version of torch."""
    return json.loads((root / "tests" / "combinations.json").read_text(encoding="utf-8"))


def test_every_step_passed_with_every_torch(tried):
    for torch, result in tried.items():
        assert [result[step] for step in ("install", "import", "compile", "trace")] == ["passed"] * 4, torch
        assert result["unit tests"] != "failed", torch
        assert result["torch"].split("+")[0] == torch


def test_the_oldest_torch_was_tried_and_no_older_one_is_taken(tried, root):
    declared = listed(root, "dependencies")["torch"]
    assert all(declared.contains(torch) for torch in tried)
    assert min(Version(torch).release[:2] for torch in tried) == least(declared) == doctor.OLDEST_TORCH


def test_the_oldest_nvrtc_was_tried_and_every_one_that_a_torch_brings_is_taken(tried, root):
    wheels = {"cuda12": ("cupy-cuda12x", "nvidia-cuda-nvrtc-cu12"), "cuda13": ("cupy-cuda13x", "nvidia-cuda-nvrtc")}
    for result in tried.values():
        cupy, nvrtc = wheels[result["extra"]]
        declared = listed(root, result["extra"])
        assert declared[nvrtc].contains(result["nvrtc"])
        name, version = result["cupy"].split()
        assert name == cupy
        assert declared[cupy].contains(version)
    oldest = min(Version(result["nvrtc"]).release[:2] for result in tried.values())
    assert oldest == least(listed(root, "cuda12")["nvidia-cuda-nvrtc-cu12"]) == cuda.OLDEST_NVRTC


def test_the_script_tries_every_minor_version_from_the_oldest(root):
    spec = importlib.util.spec_from_file_location("combinations", root / "tools" / "combinations.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    versions = [Version(torch).release for torch in script.TORCH]
    assert [release[:2] for release in versions] == [(2, minor) for minor in range(6, 6 + len(versions))]
    assert versions[0][:2] == doctor.OLDEST_TORCH
    assert set(script.RUN) == set(script.STEPS)
