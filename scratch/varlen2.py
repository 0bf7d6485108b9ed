exec(open('.bench/varlen.py').read().split("for decay in")[0])
for T in (54,512,4096,32768):
    print("prefill B1 H32 T",T,"varlen",graph_time(case([T],H=32),n=3),"wkv7",graph_time(wk(T,1,32),n=3))
a=graph_time(case([1]*256)); b=graph_time(case([2048]*4)); c=graph_time(case([1]*256+[2048]*4)); print(a,b,c,c/(a+b))
n=32
def ck(k):
    off=torch.tensor([[2048//(k+1)*(i+1) for i in range(k)]]*4,dtype=torch.int32,device="cuda"); pl=torch.arange(4*k,dtype=torch.int32,device="cuda").view(4,k)+4
    cu=torch.tensor([0,2048,4096,6144,8192],dtype=torch.int32,device="cuda"); pool=torch.randn(4+4*k,H,N,N,device="cuda"); x=inputs(8192); out=torch.empty_like(x[3])
    return lambda: rwkv_jit.wkv7_varlen(pool,*x,cu_seqlens=cu,decay="sigmoid",out=out,checkpoint_offsets=off,checkpoint_indices=pl)
for k in (1,3,7): print("4x2048 with",k,"checkpoints",graph_time(ck(k)))
