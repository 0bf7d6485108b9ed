import torch, rwkv_jit, statistics, sys
torch.manual_seed(0)
H,N=64,64
def graph_time(f, n=10, reps=15):
    f(); f(); torch.cuda.synchronize()
    g=torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        for _ in range(n): f()
    g.replay(); torch.cuda.synchronize()
    ts=[]
    for _ in range(reps):
        a,b=torch.cuda.Event(True),torch.cuda.Event(True); a.record(); g.replay(); b.record(); b.synchronize(); ts.append(a.elapsed_time(b)/n*1e3)
    return statistics.median(ts)
def inputs(T,H=H,N=N):
    r,k,v=[torch.randn(T,H,N,device="cuda",dtype=torch.bfloat16)*.5 for _ in range(3)]
    w=torch.randn(T,H,N,device="cuda",dtype=torch.bfloat16)
    kk=torch.nn.functional.normalize(torch.randn(T,H,N,device="cuda"),dim=-1)
    return r,w,k,v,(-kk).bfloat16(),(kk*torch.rand(T,H,N,device="cuda")).bfloat16()
def case(lengths,H=H,sdt=torch.float32,decay="sigmoid",**o):
    n=len(lengths); cu=torch.tensor([0]+list(torch.tensor(lengths).cumsum(0)),dtype=torch.int32,device="cuda")
    pool=torch.randn(n+5,H,N,N,device="cuda").to(sdt); x=inputs(sum(lengths),H); idx=torch.randperm(n+5,device="cuda")[:n].to(torch.int32)
    out=torch.empty_like(x[3])
    return lambda: rwkv_jit.wkv7_varlen(pool,*x,cu_seqlens=cu,state_indices=idx,decay=decay,out=out,**o)
def upd(B):
    pool=torch.randn(B+5,H,N,N,device="cuda"); x=inputs(B); idx=torch.randperm(B+5,device="cuda")[:B].to(torch.int32); out=torch.empty_like(x[3])
    return lambda: rwkv_jit.wkv7_update(pool,*x,state_indices=idx,decay="sigmoid",out=out)
def wk(T,B=1,H=H):
    x=[t.view(B,T,H,N) for t in inputs(T*B,H)]; s=torch.randn(B,H,N,N,device="cuda")
    def f():
        with torch.no_grad(): rwkv_jit.wkv7(*x,s,True,decay="sigmoid")
    return f
for decay in ("sigmoid","raw"):
    a=graph_time(case([1]*256,decay=decay)); b=graph_time(case([2048]*4,decay=decay)); c=graph_time(case([1]*256+[2048]*4,decay=decay)); 
    print(decay,"256 decodes",a,"4x2048",b,"together",c,"ratio",c/(a+b))
print("update 256",graph_time(upd(256)),"varlen few",graph_time(case([1]*256,max_seqlen=1)), "wkv7 (4,2048)",graph_time(wk(2048,4)))
for T in (54,512,4096,32768):
    print("prefill B1 H32 T",T,"varlen",graph_time(case([T],H=32),n=3),"wkv7",graph_time(wk(T,1,32),n=3))
for n in (1,2,4,8,9,16,32,64):
    t=graph_time(case([n]*256,max_seqlen=None)); 
    from rwkv_jit.inference import varlen_steps
    print("256 sequences of",n,":",t,"all token by token",graph_time(case([n]*256,max_seqlen=1),n=3))
f=case([1]*256+[2048]*4)
import time
for _ in range(5): f()
torch.cuda.synchronize(); t=time.perf_counter()
for _ in range(20): f()
h=(time.perf_counter()-t)/20*1e6; torch.cuda.synchronize(); print("host us", h)
