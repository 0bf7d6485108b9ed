"""Run: PYTHONPATH=<worktree> python replay_bench.py. us of a step in a CUDA graph, beside update and a copy. Not run yet."""
import torch, rwkv_jit
H, N = 64, 64
def timed(f, n):
    f(); g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        for _ in range(n): f()
    out = []
    for _ in range(21):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record(); g.replay(); b.record(); b.synchronize(); out.append(a.elapsed_time(b) * 1e3 / n)
    return sorted(out)[10]
for B in (256, 1024):  # float32 states of 268 MB and more: larger than L2
    s = torch.randn(B, H, N, N, device="cuda") / 8; to = torch.empty_like(s)
    x = [torch.randn(B, H, N, device="cuda", dtype=torch.bfloat16) / 8 for _ in range(6)]
    print(B, "copy", timed(lambda: to.copy_(s), 20), "update", timed(lambda: rwkv_jit.wkv7_update(s, *x), 20))
    for L in range(3, 10):  # whole periods; phases of rows are spread
        ring = rwkv_jit.ReplayRing(B, "wkv7", H, N, length=L); ring.cursors.copy_(torch.arange(B) % (L + 1))
        print(B, "replay", L, timed(lambda: rwkv_jit.wkv7_replay(s, ring, *x), 4 * (L + 1)))
    ring = rwkv_jit.ReplayRing(B, "wkv7", H, N, drafts=4); ring.cursors.copy_(torch.arange(B) % (ring.length + 1))
    d = [t.unsqueeze(1).expand(-1, 4, -1, -1).contiguous() for t in x]; n = torch.full((B,), 2, device="cuda", dtype=torch.int32)
    print(B, "verify 4", timed(lambda: rwkv_jit.wkv7_verify(s, ring, *d), 20), "verify+commit", timed(lambda: (rwkv_jit.wkv7_verify(s, ring, *d), rwkv_jit.replay_commit(s, ring, n)), 20))
