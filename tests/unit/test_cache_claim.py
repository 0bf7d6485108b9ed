"""One node at a time, which none relies on: whatever becomes of it, the others wait for a bounded time."""

import os
import stat
import threading
import time

import pytest

from rwkv_jit.kernels import cache, env, stats
from rwkv_jit.kernels.cache import claim, files, lock

DIGEST = "ab" + 62 * "0"


def path():
    return env.cache_dir() / "claims" / f"{DIGEST[:40]}.claim"


@pytest.fixture(autouse=True)
def _shared_by_nodes(monkeypatch):
    """The cache's directory is on a network; the locks are on this node's disk."""
    monkeypatch.setattr(lock, "network_file_system", lambda place: "nfs4" if place == env.cache_dir() else None)


@pytest.fixture
def of_another_node():
    """Makes a claim as another node does; `age` says how long ago."""

    def make(age=0, text=b"node1 1 2 0123\n"):
        files.make_directory(env.cache_dir())
        files.make_folder(path().parent)
        files.publish(path(), text)
        os.utime(path(), (time.time() - age, time.time() - age))

    return make


def work():
    """Do the work of one kernel; return whether a claim was held meanwhile."""
    with cache.one_at_a_time(DIGEST, "a kernel"):
        return path().exists() and path().read_text().startswith(lock.domain())


def test_claim_is_held_and_let_go():
    assert work()
    assert list(path().parent.iterdir()) == []
    with pytest.raises(RuntimeError, match="broken"), cache.one_at_a_time(DIGEST, "a kernel"):
        raise RuntimeError("broken")
    assert list(path().parent.iterdir()) == []
    assert stats.snapshot()["wait_seconds"] == 0


def test_claim_of_another_node_is_waited_for_and_then_not_needed(of_another_node, monkeypatch):
    of_another_node()
    held, done, waits, sleep = [], threading.Event(), threading.Event(), time.sleep
    monkeypatch.setattr(claim.time, "sleep", lambda seconds: waits.set() or sleep(seconds))
    waiting = threading.Thread(target=lambda: (held.append(work()), done.set()))
    waiting.start()
    assert waits.wait(60)
    assert not done.wait(0.2)
    path().unlink()
    waiting.join(60)
    assert held == [False]  # what the other node has published serves now
    assert stats.snapshot()["wait_seconds"] > 0.1


def test_wait_is_bounded_and_the_dead_nodes_claim_taken_over(of_another_node, monkeypatch):
    monkeypatch.setattr(claim, "MAX_WAIT_SECONDS", 0.02)
    of_another_node()
    assert work()
    assert not path().exists()


@pytest.mark.parametrize(("age", "holder"), [(150, "node1 1 2"), (-150, "node1 1 2"), (0, "this node")])
def test_claim_that_is_older_than_any_compile_or_of_this_node_is_taken_over_at_once(
    age, holder, of_another_node, monkeypatch
):
    """This node's process has ended, as its lock is ours."""
    monkeypatch.setattr(claim.time, "sleep", lambda _: pytest.fail("waited"))
    files.make_directory(lock.directory())
    of_another_node(age, f"{lock.domain() if holder == 'this node' else holder} 0123\n".encode())
    assert work()


def test_claim_that_changes_hands_is_waited_for_anew(of_another_node, monkeypatch):
    of_another_node()
    now, seen = [0.0], []

    def sleep(seconds):
        now[0] += 20
        seen.append(path().read_bytes())
        if len(seen) == 1:
            of_another_node(text=b"node2 1 2 4567\n")
        if len(seen) == 3:
            path().unlink()

    monkeypatch.setattr(claim.time, "sleep", sleep)
    monkeypatch.setattr(claim.time, "monotonic", lambda: now[0])
    assert not work()
    assert seen == [b"node1 1 2 0123\n", b"node2 1 2 4567\n", b"node2 1 2 4567\n"]


def test_claim_that_another_node_has_taken_over_stays_its_own(of_another_node):
    with cache.one_at_a_time(DIGEST, "a kernel"):
        of_another_node()
    assert path().read_bytes() == b"node1 1 2 0123\n"


PLACES = {
    "a file": lambda folder: folder.touch(),
    "a link": lambda folder: folder.symlink_to(folder.parent),
    "others may write": lambda folder: (folder.mkdir(), folder.chmod(0o777)),
}


@pytest.mark.parametrize("place", PLACES)
def test_where_claims_cannot_be_made_every_node_compiles(place, caplog):
    files.make_directory(env.cache_dir())
    PLACES[place](path().parent)
    assert not work()
    assert caplog.messages == []


@pytest.mark.parametrize(("world", "local", "claims"), [
    ("8", "4", True), ("4", "4", False), ("", "4", False), ("8", "", False), ("many", "4", False), ("²", "1", False),
])  # fmt: skip
def test_nodes_are_known_by_the_file_system_or_by_torchrun(world, local, claims, monkeypatch):
    monkeypatch.setattr(lock, "network_file_system", lambda _: None)
    monkeypatch.setenv("WORLD_SIZE", world)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    assert work() == claims
    assert path().parent.exists() == claims


def test_claim_is_for_the_group_that_shares_the_cache(monkeypatch):
    monkeypatch.setenv("RWKVJIT_CACHE_SHARED", "1")
    with cache.one_at_a_time(DIGEST, "a kernel"):
        assert [stat.S_IMODE(each.stat().st_mode) for each in (path().parent, path())] == [0o2770, 0o660]


def test_claims_are_ours_to_tidy_up(of_another_node):
    of_another_node(age=3700)
    cache.prune(0)
    assert not path().exists()
    of_another_node()
    cache.prune(0)
    assert path().exists()  # another node may be at work
    assert cache.clear() == 0
    assert path().exists()
