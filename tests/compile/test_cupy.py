"""The CuPy of this environment: as much of it is imported as is needed, and a report names it."""

import rwkv_jit
from rwkv_jit.kernels import cuda, identity

LOAD_LIBRARIES = """
import sys
from rwkv_jit.kernels import cuda
cuda.driver()
assert cuda.nvrtc().getVersion() >= (12, 0)
from cupy_backends.cuda._softlink import SoftLink
SoftLink("libc.so.6", "mem", mandatory=True)  # as the driver's layer does at its first call
print("cupy" in sys.modules)
"""


def test_libraries_are_loaded_without_all_of_cupy_and_whatever_the_home_is(child, read_only, tmp_path):
    home = read_only(tmp_path / "home")
    done = child(LOAD_LIBRARIES, unprivileged=True, env={"HOME": str(home)}, remove=["CUPY_CACHE_DIR"])
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_all_of_cupy_is_imported_where_its_log_is_asked_for(child):
    done = child(LOAD_LIBRARIES, env={"CUPY_DEBUG_LIBRARY_LOAD": "1"})
    assert done.stdout == "True\n"
    assert "libc.so.6" in done.stderr


def test_report_names_cupy_and_the_library_that_compiles():
    report = rwkv_jit.env_report()
    assert report["cupy"] == cuda.installed_cupy() != []
    assert report["nvrtc"] == identity.identity()
    assert any("libnvrtc" in path for path in report["nvrtc_libraries"])
