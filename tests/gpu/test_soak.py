"""A server for a long time: texts come, fork and go, drafts are accepted in part, and nothing grows."""

import os
import random
from pathlib import Path

import comparing
import pytest
import torch

import rwkv_jit
from rwkv_jit.kernels import stats

SLOTS, HEADS, SIZE, DRAFTS, NULL = 24, 2, 64, 4, -1
LIMIT = 2e-5  # of states after thousands of float32 steps


class Server:
    """A pool with its ring, graphs for each batch size, and the states in float64."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.pool = rwkv_jit.StatePool.rwkv7(SLOTS, 1, HEADS, SIZE, HEADS * SIZE)
        self.states = self.pool.wkv[0]
        self.ring = rwkv_jit.ReplayRing(SLOTS, "wkv7", HEADS, SIZE, drafts=DRAFTS, dtype=torch.float32)
        self.truth = torch.zeros(self.states.shape, device="cuda", dtype=torch.float64)
        self.texts, self.graphs = [], {}
        self.table = {
            name: x.detach()[0] for name, x in comparing.make_inputs("wkv7", torch.float32, 1, 512, HEADS, SIZE).items()
        }

    def tokens(self, *shape):
        """Inputs of random tokens out of a table, as a model's would be."""
        index = torch.randint(512, shape, device="cuda")
        return {name: x[index] for name, x in self.table.items()}

    def begin(self):
        """Do once whatever kernels and graphs are made for."""
        for lengths in ([1], [9], [1, 3], [40, 1]):
            self.admit(lengths)
        self.fork()
        for batch in range(8, SLOTS + 1, 8):
            for is_draft in (False, True):
                self.graph_of(batch, is_draft)
        self.check()
        while self.texts:
            self.evict()

    # ---- texts come and go ----

    def admit(self, lengths):
        """Read the prompts of new texts in one call."""
        new = self.pool.allocate(len(lengths))
        self.ring.reset(new)
        bounds = torch.tensor([sum(lengths[:i]) for i in range(len(new) + 1)], dtype=torch.int32, device="cuda")
        slots = torch.tensor(new, dtype=torch.int32, device="cuda")
        fresh = torch.zeros(len(new), dtype=torch.bool, device="cuda")
        given = self.tokens(sum(lengths))
        options = {"state_indices": slots, "has_initial_state": fresh}
        rwkv_jit.wkv7_varlen(self.states, *given.values(), cu_seqlens=bounds, **options)
        for i, slot in enumerate(new):
            begin = sum(lengths[:i])
            own = [x[None, begin : begin + lengths[i]].double() for x in given.values()]
            self.truth[slot] = rwkv_jit.wkv7_ref(*own, None, True)[1][0]
        self.texts += new

    def fork(self):
        source = self.draw.choice(self.texts)
        rwkv_jit.replay_flush(self.states, self.ring, state_indices=torch.tensor([source], device="cuda"))
        (new,) = self.pool.fork(source)
        self.ring.reset(new)
        self.truth[new] = self.truth[source]
        self.texts.append(new)

    def evict(self):
        self.pool.free(self.texts.pop(self.draw.randrange(len(self.texts))))

    # ---- a step ----

    def graph_of(self, batch, is_draft):
        if (batch, is_draft) in self.graphs:
            return self.graphs[batch, is_draft]
        given = self.tokens(batch, DRAFTS if is_draft else 1)
        slots = torch.full((batch,), NULL, dtype=torch.int32, device="cuda")
        accepted = torch.zeros(batch, dtype=torch.int32, device="cuda")

        def run():
            if not is_draft:
                return rwkv_jit.wkv7_replay(self.states, self.ring, *given.values(), state_indices=slots)
            y = rwkv_jit.wkv7_verify(self.states, self.ring, *given.values(), state_indices=slots)
            rwkv_jit.replay_commit(self.states, self.ring, accepted, state_indices=slots)
            return y

        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = run()
        self.graphs[batch, is_draft] = graph, given, slots, accepted, y
        return self.graphs[batch, is_draft]

    def step(self, looks):
        rows = self.draw.sample(self.texts, self.draw.randint(1, len(self.texts)))
        batch, is_draft = 8 * -(-len(rows) // 8), self.draw.random() < 0.5
        graph, given, slots, accepted, y = self.graph_of(batch, is_draft)
        for held, x in zip(given.values(), self.tokens(*given["r"].shape[:2]).values(), strict=True):
            held.copy_(x)
        slots.copy_(torch.tensor(rows + [NULL] * (batch - len(rows)), dtype=torch.int32))
        accepted.copy_(torch.randint(DRAFTS + 1, (batch,), dtype=torch.int32))
        graph.replay()

        index, state = torch.tensor(rows, device="cuda"), self.truth[rows]
        r, w, k, v, a, b = (x[: len(rows)].double() for x in given.values())
        for t in range(r.shape[1]):
            decay = torch.exp(-torch.exp(w[:, t])).unsqueeze(-2)
            own = state * decay + (state @ a[:, t].unsqueeze(-1)) * b[:, t].unsqueeze(-2)
            own += v[:, t].unsqueeze(-1) * k[:, t].unsqueeze(-2)
            counts = t < accepted[: len(rows)] if is_draft else torch.ones(len(rows), device="cuda", dtype=torch.bool)
            if looks and t == 0:
                want = (own @ r[:, t].unsqueeze(-1)).squeeze(-1)
                assert comparing.relative(y[: len(rows), t], want) < LIMIT
            state = torch.where(counts[:, None, None, None], own, state)
        self.truth[index] = state

    def run(self, step):
        free = self.pool.free_count
        if free and (len(self.texts) < 4 or self.draw.random() < 0.03):
            self.admit([self.draw.choice([1, 3, 9, 40]) for _ in range(min(self.draw.choice([1, 2]), free))])
        elif free and self.draw.random() < 0.03:
            self.fork()
        elif len(self.texts) > 4 and self.draw.random() < 0.06:
            self.evict()
        self.step(looks=step % 50 == 0)

    def check(self):
        rwkv_jit.replay_flush(self.states, self.ring)
        assert not self.ring.arrivals.any()
        for slot in self.texts:
            assert comparing.relative(self.states[slot], self.truth[slot]) < LIMIT, slot
        assert self.pool.allocated == tuple(sorted(self.texts))


def held():
    """Bytes on the GPU, bytes of the process, its open files, kernels that it compiled, and bytes that it wrote."""
    torch.cuda.synchronize()
    resident = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    made = stats.snapshot()
    files = len(os.listdir("/proc/self/fd"))
    return torch.cuda.memory_allocated(), resident, files, made["compiled"], made["bytes_written"]


def soak(steps, seed):
    server, before = Server(seed), None
    server.begin()
    for step in range(steps):
        server.run(step)
        if step == steps // 5:
            before = held()
        if step % (steps // 4) == 0:
            server.check()
    server.check()
    after = held()
    # The texts of a moment have no memory of their own.
    assert after[0] <= before[0] + 2**20
    assert after[1] <= before[1] + 2**26
    assert after[2:] == before[2:]


@pytest.mark.parametrize("op", ["inference"])  # the section of the record
def test_a_server_goes_on(op, request):
    soak(1500, request.config.option.seed)


@pytest.mark.full
@pytest.mark.parametrize("op", ["inference"])
def test_a_server_goes_on_for_a_hundred_thousand_steps(op, request):
    soak(100_000, request.config.option.seed)
