"""One process at a time, whatever becomes of it; and none at all where locks cannot work."""

import errno
import fcntl
import io
import os
import re
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from rwkv_jit.kernels import stats
from rwkv_jit.kernels.cache import lock

DIGEST = "ab" + 62 * "0"
HOLD = """
import sys
from rwkv_jit.kernels.cache import lock
with lock.held(sys.argv[1], "a kernel"):
    print("held", len(lock._held), flush=True)
    sys.stdin.readline()
print("let go", flush=True)
sys.stdin.readline()
"""


def path(digest=DIGEST):
    return lock.directory() / f"{digest[:2]}.lock"


def is_free(digest=DIGEST):
    """Whether a process could take the lock now."""
    lock.directory().mkdir(mode=0o700, exist_ok=True)
    handle = lock._try(path(digest))
    if handle is None:
        return False
    lock._release(handle)
    return True


def say(process, line=""):
    process.stdin.write(line + "\n")
    process.stdin.flush()


# ---- held --------------------------------------------------------------------------------------------------------


def test_lock_keeps_others_out_until_it_is_let_go(caplog, monkeypatch):
    monkeypatch.setattr(lock.time, "sleep", lambda _: pytest.fail("waited"))
    with lock.held(DIGEST, "a kernel"):
        assert not is_free()
        assert is_free("ac")
    assert is_free()
    with pytest.raises(RuntimeError, match="broken"), lock.held(DIGEST, "a kernel"):
        raise RuntimeError("broken")
    assert is_free()
    assert lock._held == set()
    assert stats.snapshot()["wait_seconds"] == 0
    assert caplog.messages == []


def test_threads_take_turns():
    inside, most, start = [], [], threading.Barrier(4)

    def work(_):
        start.wait()
        with lock.held(DIGEST, "a kernel"):
            inside.append(1)
            most.append(len(inside))
            threading.Event().wait(0.01)
            inside.pop()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert most == [1, 1, 1, 1]


def test_lock_of_another_process_is_waited_for(start, monkeypatch):
    other = start(HOLD, DIGEST)
    assert other.stdout.readline() == "held 1\n"
    taken, waiting, sleep = threading.Event(), threading.Event(), time.sleep

    def take():
        with lock.held(DIGEST, "a kernel"):
            taken.set()

    monkeypatch.setattr(lock.time, "sleep", lambda seconds: waiting.set() or sleep(seconds))
    thread = threading.Thread(target=take)
    thread.start()
    assert waiting.wait(60)
    assert not taken.wait(0.1)
    say(other)
    assert taken.wait(60)
    thread.join()
    assert stats.snapshot()["wait_seconds"] > 0.05


def test_wait_is_bounded_and_spoken_of(start, monkeypatch, caplog):
    """By a clock that goes on while the program sleeps, and no sooner than it has spoken."""
    now, spoken, sleep = [0.0], [], time.sleep
    waiting = "waiting for another process that compiles wkv7 for sm_90"
    waited = "waited 80 s for the process that compiles wkv7 for sm_90: compiling it here too"

    def wait(seconds):
        while caplog.messages.count(waiting) < len(spoken):
            sleep(0.001)
        now[0] += 40

    other = start(HOLD, DIGEST)
    other.stdout.readline()
    monkeypatch.setattr(stats, "_QUIET_SECONDS", 0.01)
    monkeypatch.setattr(lock.time, "sleep", wait)
    monkeypatch.setattr(lock.time, "monotonic", lambda: now[0])
    for _ in range(2):
        spoken.append(waiting)
        with lock.held(DIGEST, "wkv7 for sm_90"):
            assert lock._held == set()
    assert now == [160.0]  # of a bound of 60 seconds
    assert caplog.messages == [waiting, waited, waiting]
    say(other)
    assert other.stdout.readline() == "let go\n"
    assert is_free()


def test_lock_that_cannot_be_let_go_costs_one_warning_and_no_handle(monkeypatch, caplog):
    really_flock, handles = fcntl.flock, len(os.listdir("/proc/self/fd"))

    def flock(handle, how):
        if how == fcntl.LOCK_UN:
            raise OSError(errno.ESTALE, "Stale file handle")
        really_flock(handle, how)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", flock)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="broken"), lock.held(DIGEST, "a kernel"):
                raise RuntimeError("broken")  # which is not hidden
    assert caplog.messages == [f"a lock in {lock.directory()} could not be let go: Stale file handle"]
    assert len(os.listdir("/proc/self/fd")) == handles
    assert lock._held == set()
    assert is_free()


# ---- files -------------------------------------------------------------------------------------------------------


def test_there_are_256_locks_at_most_and_they_stay(tmp_path):
    before = os.umask(0)
    try:
        for digest in ("ab1", "ab2", "cd1"):
            with lock.held(digest, "a kernel"):
                pass
    finally:
        os.umask(before)
    assert sorted(file.name for file in lock.directory().iterdir()) == ["ab.lock", "cd.lock"]
    assert stat.S_IMODE(lock.directory().stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in lock.directory().iterdir()} == {0o600}


def fails(error):
    def fail(*_):
        raise error

    return fail


# What is done to the directory of locks, with the fixtures that it takes, and what is said then.
UNUSABLE = {
    "others may write": (lambda folder, *_: (folder.mkdir(), folder.chmod(0o777)), "can be written by others"),
    "another's": (lambda folder, give_away, _: (folder.mkdir(0o700), give_away(folder)), "belongs to user 54321"),
    "a link": (
        lambda folder, *_: (folder.with_name("target").mkdir(0o700), folder.symlink_to("target")), "is a symbolic link",
    ),
    "a file": (lambda folder, *_: folder.touch(), "File exists"),
    "on a network": (
        lambda _, __, monkeypatch: monkeypatch.setattr(lock, "network_file_system", lambda _: "nfs4"),
        r"is on a network file system \(nfs4\); name a disk of this node in TMPDIR",
    ),
    "a link for a lock": (
        lambda folder, *_: (folder.mkdir(0o700), path().symlink_to("/etc/passwd")), "symbolic link",
    ),
    "no locks": (
        lambda _, __, monkeypatch: monkeypatch.setattr(fcntl, "flock", fails(OSError(errno.ENOLCK, "No locks here"))),
        "No locks here",
    ),
    "nowhere": (
        lambda _, __, monkeypatch: monkeypatch.setattr(lock.tempfile, "gettempdir", fails(OSError("No usable place"))),
        "No usable place",
    ),
}  # fmt: skip


@pytest.mark.parametrize("shared", ["0", "1"])
@pytest.mark.parametrize("why", UNUSABLE)
def test_without_a_directory_to_trust_there_is_no_lock_and_one_warning(why, shared, give_away, monkeypatch, caplog):
    """Sharing a cache is no reason to let others hold one's locks."""
    monkeypatch.setenv("RWKVJIT_CACHE_SHARED", shared)
    folder, (make_it_so, said) = lock.directory(), UNUSABLE[why]
    make_it_so(folder, give_away, monkeypatch)
    before = folder.lstat().st_mode if os.path.lexists(folder) else None
    handles = len(os.listdir("/proc/self/fd"))
    ran = []
    for _ in range(2):
        with lock.held(DIGEST, "a kernel"), lock.held(DIGEST, "a kernel"):
            assert lock._held == set()
            ran.append(1)
    assert ran == [1, 1]
    (message,) = caplog.messages
    assert message.startswith("every process compiles for itself, as there is no directory for locks: ")
    assert re.search(said, message)
    assert before is None or folder.lstat().st_mode == before  # it is not repaired
    assert len(os.listdir("/proc/self/fd")) == handles


def test_directory_that_cannot_be_written_gives_no_lock_and_one_warning(child):
    lock.directory().mkdir(mode=0o700)
    lock.directory().chmod(0o500)
    code = """
from rwkv_jit.kernels.cache import lock
for _ in range(2):
    with lock.held("ab", "a kernel"):
        print(len(lock._held))
"""
    done = child(code, unprivileged=True)
    assert done.stdout == "0\n0\n"
    assert done.stderr.count("every process compiles for itself") == done.stderr.count("Permission denied") == 1
    assert list(lock.directory().iterdir()) == []


MOUNTS = """\
/dev/vda / ext4 rw 0 0
tmpfs /tmp tmpfs rw 0 0
server:/home /home nfs4 rw 0 0
/dev/vdb /home/local ext4 rw 0 0
server:/data /data ext4 rw 0 0
server:/data /data lustre rw 0 0
server:/twice /twice nfs rw 0 0
/dev/vdc /twice xfs rw 0 0
server:/s /with\\040space nfs rw 0 0
me@there: /there fuse.sshfs rw 0 0
"""


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("/", None),
        ("/tmp/rwkv_jit-0", None),
        ("/home/me/tmp", "nfs4"),
        ("/home", "nfs4"),
        ("/homes/me", None),
        ("/home/local/tmp", None),
        ("/data/x", "lustre"),
        ("/twice/x", None),
        ("/with space/x", "nfs"),
        ("/there/x", "fuse.sshfs"),
    ],
)
def test_network_file_systems_are_told_by_the_last_longest_mount_point(place, kind, monkeypatch):
    monkeypatch.setattr(lock, "open", lambda *_, **__: io.StringIO(MOUNTS), raising=False)
    assert lock.network_file_system(place) == kind


def test_network_file_system_behind_a_link_is_found(monkeypatch, tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "far")
    table = f"/dev/vda / ext4 rw 0 0\nserver:/ {tmp_path / 'far'} nfs rw 0 0\n"
    monkeypatch.setattr(lock, "open", lambda *_, **__: io.StringIO(table), raising=False)
    assert lock.network_file_system(tmp_path / "link" / "x") == "nfs"


def test_file_systems_are_unknown_without_a_table(monkeypatch, tmp_path):
    def missing(*_, **__):
        raise FileNotFoundError

    monkeypatch.setattr(lock, "open", missing, raising=False)
    assert lock.network_file_system(tmp_path) is None


# ---- forks and copies --------------------------------------------------------------------------------------------

FORK = """
import os, sys
from rwkv_jit.kernels import kernel  # it asks to be told of forks
from rwkv_jit.kernels.cache import lock
with lock.held(sys.argv[1], "a kernel"):
    (handle,) = lock._held
    ready, tell = os.pipe()
    stay, end = os.pipe()
    if os.fork() == 0:
        assert lock._held == set()
        taken = os.open(os.devnull, os.O_RDONLY)
        assert taken == handle  # the child's copy was closed
        break_out = True
    else:
        break_out = False
        os.close(tell)
        assert os.read(ready, 1) == b"x"  # and not the end of a child that has failed
        print("forked", lock._try(lock.directory() / f"{sys.argv[1][:2]}.lock"), flush=True)
        sys.stdin.readline()
if break_out:
    os.fstat(taken)  # what leaving the block did not close
    os.write(tell, b"x")
    os.close(end)
    os.read(stay, 1)  # until the parent ends
    os._exit(0)
print("let go", flush=True)
sys.stdin.readline()
"""


def test_forked_child_closes_its_copy_and_the_parents_lock_survives(start):
    parent = start(FORK, DIGEST)
    assert parent.stdout.readline() == "forked None\n", parent.stderr.read()
    assert not is_free()
    say(parent)
    assert parent.stdout.readline() == "let go\n"
    assert is_free()  # though the child still runs


def test_lock_is_let_go_though_another_process_has_a_copy():
    """One that was forked at the moment when the file had just been opened."""
    with ExitStack() as stack:
        with lock.held(DIGEST, "a kernel"):
            (handle,) = lock._held
            stack.callback(os.close, os.dup(handle))
        assert is_free()


# ---- without flock -----------------------------------------------------------------------------------------------


def test_without_the_posix_only_names_locks_keep_others_out_too(start):
    code = HOLD.replace("len(lock._held)", "lock._try(lock.directory() / f'{sys.argv[1][:2]}.lock')")
    environment = {"USERNAME": "someone"}
    holder = start(code, DIGEST, without_posix=True, env=environment)
    assert holder.stdout.readline() == "held None\n", holder.stderr.read()
    waiter = start(code, DIGEST, without_posix=True, env=environment)
    say(holder)
    assert holder.stdout.readline() == "let go\n"
    assert waiter.stdout.readline() == "held None\n", waiter.stderr.read()
    assert (lock.directory().parent / "rwkv_jit-someone").is_dir()
