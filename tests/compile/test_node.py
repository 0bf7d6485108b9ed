"""Many processes of one node: one compiles, the others wait for it; and whatever becomes of it, none waits for ever."""

import json
import os
import time

import pytest

from rwkv_jit.ahead import warm
from rwkv_jit.kernels import cache, env, kernel
from rwkv_jit.kernels.cache import bundle

# Reads the template that is named, waits for a line if it shall, and tells where the kernel came from.
GET = """
import json, sys
from pathlib import Path
from rwkv_jit.kernels import kernel, stats, template
request = kernel.Request(template.read(Path(sys.argv[1])), {"SIZE": int(sys.argv[2])}, "sm_90")
if len(sys.argv) > 3:
    print("ready", flush=True)
    sys.stdin.readline()
found = kernel.get(request)
loaded = [name for name in ("cupy", "torch") if sys.modules.get(name)]
told = {"origin": found.origin, "code": found.cubin.hex(), "loaded": loaded, **stats.snapshot()}
print(json.dumps(told), flush=True)
"""
# Stops where a function is called with certain arguments, and says so.
STOP = """
import {module}
really = {module}.{name}
def stop(*given):
    if not ({when}):
        return really(*given)
    print("stopped", flush=True)
    sys.stdin.readline()
    sys.exit("went on")
{module}.{name} = stop
"""
BLOCK_CUPY = """
import sys
sys.modules["cupy"] = None
"""


def stopping(module, name, when="True"):
    imports, rest = GET.split("request =")
    return imports + STOP.format(module=module, name=name, when=when) + "request =" + rest


COMPILING = stopping("rwkv_jit.kernels.compiler", "compile")
PUBLISHING = stopping("os", "replace", when='str(given[1]).endswith(".cubin")')


SLOW = ("waiting for another ", "compiling ")  # what is said where that takes a second


def say(process):
    process.stdin.write("\n")
    process.stdin.flush()


def kill_where_it_stops(process):
    assert process.stdout.readline() == "stopped\n"
    process.kill()
    process.wait()


@pytest.fixture
def path(tiny, tmp_path):
    tiny()
    return tmp_path / "tiny.cu"


@pytest.fixture
def get(child, path):
    """Gets a kernel in a process of its own and returns what that told."""

    def get(size=1, code=GET, **options):
        done = child(code, path, size, **options)
        warnings = [line for line in done.stderr.splitlines() if not line.startswith(SLOW)]
        return {**json.loads(done.stdout), "warnings": warnings}

    return get


def told_by(processes):
    """Lets processes that are ready go on all at once; returns what each told, and what they said."""
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        say(process)
    told = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes)
    return [json.loads(output) for output, _ in told], [line for _, errors in told for line in errors.splitlines()]


# ---- one compile per node ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "without_posix"), [(16, False), (4, True)], ids=["flock", "without POSIX"])
def test_one_of_many_processes_that_start_together_compiles(count, without_posix, start, path):
    more = {"without_posix": without_posix, "env": {"USERNAME": "someone"}}
    told, _ = told_by([start(GET, path, 1, "wait", **more) for _ in range(count)])
    assert sorted(one["origin"] for one in told) == ["compiled", *["disk"] * (count - 1)]
    assert sum(one["compiled"] for one in told) == 1
    assert {tuple(one["loaded"]) for one in told if one["origin"] == "disk"} == {()}
    assert len({one["code"] for one in told}) == 1
    assert sum(one["wait_seconds"] > 0 for one in told) > 0
    assert len(cache.entries()) == 1


def test_process_that_is_killed_while_it_compiles_is_succeeded_by_one_that_waits(start, get, path):
    killed = start(COMPILING, path, 1)
    assert killed.stdout.readline() == "stopped\n"
    waiting = start(GET, path, 1, "wait")
    assert waiting.stdout.readline() == "ready\n"
    say(waiting)
    killed.kill()
    killed.wait()
    output, errors = waiting.communicate(timeout=300)
    assert json.loads(output)["origin"] == "compiled"
    assert [line for line in errors.splitlines() if not line.startswith(SLOW)] == []
    assert get()["origin"] == "disk"


def test_process_that_is_killed_while_it_writes_leaves_nothing_that_counts(start, get, path, fresh_service):
    kill_where_it_stops(start(PUBLISHING, path, 1))
    left = sorted(fresh_service.rglob(".*.tmp"))
    assert [temporary.parent.name for temporary in left] == ["sm_90"]
    assert cache.entries() == []
    assert get()["origin"] == "compiled"
    assert get()["origin"] == "disk"
    assert len(cache.entries()) == 1
    for temporary in left:
        os.utime(temporary, (time.time() - 3700, time.time() - 3700))
    assert get(2)["origin"] == "compiled"
    assert list(fresh_service.rglob(".*.tmp")) == []


# ---- many nodes --------------------------------------------------------------------------------------------------

RANKS = 2  # of each node
# Gets several kernels, as a training script does, and tells how many of them it compiled.
GET_SEVERAL = """
import json, sys
from pathlib import Path
from rwkv_jit.kernels import cache, kernel, stats, template
from rwkv_jit.kernels.cache import claim, lock
claim.MAX_WAIT_SECONDS = float(sys.argv[2])
requests = [kernel.Request(template.read(Path(sys.argv[1])), {"SIZE": size}, "sm_90") for size in range(1, 4)]
print("ready", flush=True)
sys.stdin.readline()
codes = [kernel.get(request).cubin.hex() for request in requests]
print(json.dumps({"codes": codes, **stats.snapshot()}), flush=True)
"""


@pytest.fixture
def node(tmp_path):
    """Returns the variables of a rank as torchrun sets them on a node: a home and a disk of the node's own."""

    def variables(number, rank=0, nodes=2):
        home = tmp_path / f"node{number}"
        (home / "tmp").mkdir(parents=True, exist_ok=True)
        return {
            "HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), "TMPDIR": str(home / "tmp"),
            "LOCAL_RANK": str(rank), "RANK": str(number * RANKS + rank), "GROUP_RANK": str(number),
            "LOCAL_WORLD_SIZE": str(RANKS), "WORLD_SIZE": str(nodes * RANKS), "GROUP_WORLD_SIZE": str(nodes),
        }  # fmt: skip

    return variables


def run_ranks(start, node, code, *arguments, places=((0, 0), (0, 1), (1, 0), (1, 1)), **options):
    """Runs the ranks of two nodes at once; returns what each told."""
    ranks = [start(code, *arguments, env=node(*place), **options) for place in places]
    told, said = told_by(ranks)
    assert [line for line in said if not line.startswith(SLOW)] == []
    return told


def test_nodes_that_share_a_folder_compile_each_kernel_once_in_all(start, node, path, fresh_service):
    told = run_ranks(start, node, GET_SEVERAL, path, 60)
    assert sum(each["compiled"] for each in told) == 3
    assert sum(each["disk"] for each in told) == 3 * 3
    assert len({tuple(each["codes"]) for each in told}) == 1
    assert len(cache.entries()) == 3
    assert list((fresh_service / "claims").iterdir()) == []
    assert all(lock_folder.is_dir() for lock_folder in (path.parent.glob("node*/tmp/rwkv_jit-*")))


def test_nodes_with_homes_of_their_own_compile_each_kernel_once_per_node(start, node, path):
    told = run_ranks(start, node, GET_SEVERAL, path, 60, remove=["RWKVJIT_CACHE_DIR"])
    assert [sum(each["compiled"] for each in told[ranks]) for ranks in (slice(0, 2), slice(2, 4))] == [3, 3]
    assert len({tuple(each["codes"]) for each in told}) == 1
    for number in (0, 1):
        assert len(list(path.parent.glob(f"node{number}/cache/rwkv_jit/sm_90/*.cubin"))) == 3
    assert cache.entries() == []


@pytest.mark.parametrize("code", [COMPILING, PUBLISHING], ids=["compiles", "publishes"])
def test_node_that_dies_while_it_works_is_waited_for_no_longer_than_the_bound(code, start, node, path, fresh_service):
    claims = fresh_service / "claims"
    kill_where_it_stops(start(code, path, 1, env=node(0)))
    assert len(list(claims.iterdir())) == 1
    assert cache.entries() == []
    other = start(GET_SEVERAL, path, 0.2, env=node(1))
    say(other)
    told = json.loads(other.communicate(timeout=300)[0].splitlines()[-1])
    assert (told["compiled"], told["disk"]) == (3, 0)
    assert told["wait_seconds"] > 0.2
    assert list(claims.iterdir()) == []
    assert [each.fault for each in cache.stored()] == [""] * 3


def test_node_that_starts_anew_takes_over_what_its_killed_process_had_claimed(start, node, path, fresh_service):
    kill_where_it_stops(start(COMPILING, path, 1, env=node(0)))
    assert len(list((fresh_service / "claims").iterdir())) == 1
    again = start(GET_SEVERAL, path, 1e9, env=node(0))
    say(again)
    told = json.loads(again.communicate(timeout=300)[0].splitlines()[-1])
    assert told["compiled"] == 3


@pytest.mark.parametrize(("variables", "begin"), [
    ({}, 0), ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, 2), ({"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}, 3),
    ({"LOCAL_RANK": "7", "LOCAL_WORLD_SIZE": "2"}, 0), ({"LOCAL_RANK": "x", "LOCAL_WORLD_SIZE": "2"}, 0),
    ({"LOCAL_RANK": "-1", "LOCAL_WORLD_SIZE": "2"}, 0), ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "0"}, 0),
])  # fmt: skip
def test_ranks_of_a_node_begin_at_different_kernels_and_return_them_in_order(variables, begin, tiny, monkeypatch):
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    asked, really_get = [], kernel.get_async
    monkeypatch.setattr(kernel, "get_async", lambda request: asked.append(request) or really_get(request))
    requests = [tiny(size) for size in (1, 2, 3, 4)]
    found = warm.compile_all([*requests, requests[0]])
    assert [each.parameters["SIZE"] for each in found] == [1, 2, 3, 4]
    assert asked == [*requests[begin:], *requests[:begin]]


WARM = """
import sys
from rwkv_jit.desk import cli, commands  # what takes long
import torch, rwkv_jit.desk.demo
print("ready", flush=True)
sys.stdin.readline()
sys.exit(cli.main(sys.argv[1:]))
"""
WHAT = ("--op", "wkv7", "--head-size", "8,16", "--dtype", "fp32", "--direction", "forward", "--arch", "sm_90")


def test_warm_under_torchrun_compiles_each_kernel_once_in_all(start, node, run, monkeypatch):
    told = run_ranks(start, node, WARM, "warm", *WHAT, "--json", places=((0, 0), (1, 1)), after="torch")
    names = [[(each["name"], str(each["parameters"])) for each in rank["kernels"]] for rank in told]
    assert names[0] == names[1] != []
    for number, name in enumerate(names[0]):
        assert sorted(rank["kernels"][number]["origin"] for rank in told) == ["compiled", "disk"], name
    assert len(cache.entries()) == len(names[0])
    said = f"{len(names[0])} kernels, {cache.size() / 2**20:.3g} MB, in {env.cache_dir()}"
    monkeypatch.delenv("RANK", raising=False)
    assert said in run("warm", *WHAT)[1]
    for rank, ending in (("0", said), ("3", "")):
        monkeypatch.setenv("RANK", rank)
        code, printed, _ = run("warm", *WHAT)
        assert (code, bool(printed), ending in printed) == (0, bool(ending), True)


NO_HOME = """
import os, platformdirs
def unknown(*_, **__):
    raise RuntimeError("could not determine the home directory")
platformdirs.user_cache_path = unknown
"""


def test_without_a_home_kernels_are_kept_in_memory_and_one_message_says_so(get, tmp_path):
    code = NO_HOME + GET.replace(
        "loaded =", "request = request._replace(parameters={'SIZE': 2})\nassert kernel.get(request)\nloaded ="
    )
    removed = ["RWKVJIT_CACHE_DIR", "XDG_CACHE_HOME", "CUPY_CACHE_DIR"]
    told = get(code=code, env={"HOME": "nowhere"}, remove=removed)
    assert (told["origin"], told["compiled"], told["bytes_written"]) == ("compiled", 2, 0)
    assert told["warnings"] == [
        "kernels are kept in memory only: the home directory is not known; "
        "set RWKVJIT_CACHE_DIR to a directory that you own"
    ]
    told = get(code=code, env={"HOME": "nowhere", "RWKVJIT_CACHE": "0"}, remove=removed)
    assert (told["origin"], told["warnings"]) == ("compiled", [])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny.cu"]


# ---- forks -------------------------------------------------------------------------------------------------------

FORK = """
import os, sys, threading
from pathlib import Path
from rwkv_jit.kernels import compiler, kernel, stats, template
def say(text):  # one write, as parent and child share the pipe
    os.write(1, f"{text}\\n".encode())
request = kernel.Request(template.read(Path(sys.argv[1])), {"SIZE": 1}, "sm_90")
compile, inside, go = compiler.compile, threading.Event(), threading.Event()
def slow(*arguments):
    inside.set()
    go.wait()
    return compile(*arguments)
compiler.compile = slow
thread = threading.Thread(target=lambda: say(f"parent {kernel.get(request).origin}"))
thread.start()
inside.wait()
child = os.fork()
if child == 0:
    compiler.compile = compile
    say(f"child {kernel.get(request._replace(parameters={'SIZE': 2})).origin}")
    say(f"child {kernel.get(request).origin}")  # waits for its parent
    os._exit(0)
say(sys.stdin.readline().strip())
go.set()
thread.join()
say(f"status {os.waitpid(child, 0)[1]}")
"""


def test_child_forked_in_the_middle_of_a_compile_compiles_and_waits_as_any_process(start, path):
    process = start(FORK, path)
    assert process.stdout.readline() == "child compiled\n", process.stderr.read()
    process.stdin.write("go on\n")
    process.stdin.flush()
    lines = process.communicate(timeout=300)[0].splitlines()
    assert sorted(lines) == ["child disk", "go on", "parent compiled", "status 0"]


FORK_IN_NVRTC = """
import os, signal, sys, threading
from pathlib import Path
from rwkv_jit.kernels import cuda, kernel, template
read = template.read(Path(sys.argv[1]))
nvrtc = cuda.nvrtc()
compile, inside, is_inside = nvrtc.compileProgram, threading.Event(), False
def told(*arguments):
    global is_inside
    is_inside = True
    inside.set()
    compile(*arguments)
    is_inside = False
nvrtc.compileProgram = told
def get(size):
    return kernel.get(kernel.Request(read, {"SIZE": size}, "sm_90"))
thread = threading.Thread(target=get, args=[200])
thread.start()
inside.wait()
assert is_inside
child = os.fork()
if child == 0:
    signal.alarm(60)
    assert not is_inside, "forked inside NVRTC"
    assert get(1).origin == "compiled"
    os._exit(0)
thread.join()
assert get(2).origin == "compiled"  # the gate is open again
print(os.waitpid(child, 0)[1])
"""


def test_fork_waits_for_a_thread_inside_the_compiler(tiny, tmp_path, child):
    tiny(
        text="""
extern "C" __global__ void fill(float* x) {
    #pragma unroll
    for (int i = 0; i < SIZE; i++) x[i] = __expf(x[i]) + x[i + 1] * i;
}
"""
    )
    done = child(FORK_IN_NVRTC, tmp_path / "tiny.cu")
    assert done.stdout == "0\n", done.stderr


# ---- bundles -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("maker", ["this compiler", "11.8 made elsewhere"])
@pytest.mark.parametrize("origin", ["bundle", "shared"])
def test_process_with_the_kernels_of_others_needs_no_compiler(origin, maker, get, tiny, tmp_path):
    made = kernel.get(tiny())
    made.compiler = made.compiler if maker == "this compiler" else maker
    name, data = made.entry()
    cache.clear()
    place = tmp_path / origin
    if origin == "bundle":
        bundle.write(place, [(name, data)])
    else:
        (place / name).parent.mkdir(parents=True)
        (place / name).write_bytes(data)
        (place / "nvrtc-0000000000000000.json").write_text(json.dumps({"identity": made.compiler}))
    for more in ({}, {"RWKVJIT_ASSERT_CACHED": "1"}):
        told = get(code=BLOCK_CUPY + GET, env={"RWKVJIT_CACHE_PATH": str(place), **more})
        assert (told["origin"], told[origin], told["compiled"], told["loaded"]) == (origin, 1, 0, [])
        assert (bytes.fromhex(told["code"]), told["warnings"]) == (made.cubin, [])
    assert cache.entries() == []
