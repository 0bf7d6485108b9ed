import random, pytest, torch, rwkv_jit, sys
import replay_emulate
from rwkv_jit.ops.table import OPS
CASES=[]
for i,(K,V) in enumerate([(64,64),(12,20),(7,13),(1,1),(33,40),(48,33),(100,100),(128,128)]):
    for name in ("wkv7","wkv6","linear_attention","gla","wkv5"):
        for layout in ("vk","kv"):
            CASES.append((name,layout,K,V))
def go(on_gpu,name,layout,K,V,dtype,state,length,drafts,seed,steps=14,B=3,H=2,decay=None,strong=False,one=False):
    on_gpu.use("sm_90"); on_gpu.while_running=replay_emulate.run
    torch.manual_seed(seed); rnd=random.Random(seed)
    op=OPS[name]; slots=5
    sizes=dict(B=B,H=H,K=K,V=V); dims=op.state_dims(layout)
    size=H*K*V; spare=rnd.choice([0,1,3,4])
    mem=torch.full((slots,size+spare),float("nan")).to(state)
    pool=mem[:,:size].unflatten(1,tuple(sizes[d] for d in dims[0:]))
    pool.copy_(torch.randn(pool.shape)); 
    ring=rwkv_jit.ReplayRing(slots,name,H,K,V,length=length,drafts=drafts,dtype=dtype,state_dtype=state,device="cpu")
    for x in ring.tensors[2:]: x.fill_(float("nan"))
    truth=pool.double().clone()
    fixed={n:(torch.randn(H,K)*.3).to(dtype) for n,d in op.inputs.items() if "T" not in d}
    errs=[0.,0.]
    kinds=set()
    for step in range(steps):
        slot=torch.randperm(slots)[:B].to(rnd.choice([torch.int32,torch.int64]))
        if rnd.random()<.3: slot[rnd.randrange(B)]=rnd.choice([-1,-7,slots])
        T=1 if one else rnd.choice([1,1,2,drafts])
        given={n:(fixed[n] if n in fixed else (torch.randn(B,T,H,V if d[-1]=="V" else K)*.3).to(dtype)) for n,d in op.inputs.items()}
        if name=="gla" and decay is None: given["w"]=-given["w"].abs()
        kw=dict(state_indices=slot,state_layout=layout); more={}
        if decay:
            more["decay"]=decay; more["w0"]=torch.zeros(H,K)
            if decay=="direct" and "w" not in fixed:
                w=torch.rand_like(given["w"].float()); w[w<.2]=0; w[w>.9]=-.5; w[(w>.8)&(w<.85)]=1e-30; given["w"]=w.to(dtype)
            if decay=="raw" and "w" not in fixed: given["w"]=given["w"]*30
        there=(slot>=0)&(slot<slots); places=slot[there].long()
        some={n:(x[there] if n not in fixed else x).double() for n,x in given.items()}
        ref=getattr(rwkv_jit,name+"_ref"); sc=op.scale or K**-.5
        rk=dict(scale=sc,state_layout=layout); 
        if decay: rk["decay"]=decay
        kind=rnd.choice(["replay","replay","verify","verify","flush"]); kinds.add(kind)
        if kind=="flush":
            rwkv_jit.replay_flush(pool,ring,**kw); assert (ring.cursors[places]==0).all()
            continue
        out=torch.full((B,T,H,V),float("nan"),dtype=dtype)
        y=getattr(rwkv_jit,f"{name}_{kind}")(pool,ring,*given.values(),out=out,**kw,**more)
        want,final=ref(*some.values(),truth[places],True,**rk)
        if len(places): errs[0]=max(errs[0],float((y[there].double()-want).norm()/want.norm().clamp_min(1e-9)))
        assert not torch.isnan(y).any() and not y[~there].any()
        if kind=="replay": truth[places]=final
        else:
            acc=torch.tensor([rnd.randint(0,T) for _ in range(B)],dtype=rnd.choice([torch.int32,torch.int64]))
            rwkv_jit.replay_commit(pool,ring,acc,**kw)
            for row,s in enumerate(slot.tolist()):
                if not 0<=s<slots or acc[row]==0: continue
                own={n:(x[row:row+1,:acc[row]] if n not in fixed else x).double() for n,x in given.items()}
                truth[s]=ref(*own.values(),truth[s:s+1],True,**rk)[1][0]
        assert (ring.cursors<=length).all() and (ring.cursors>=0).all() and not ring.arrivals.any()
    rwkv_jit.replay_flush(pool,ring,state_layout=layout)
    errs[1]=float((pool.double()-truth).norm()/truth.norm())
    assert torch.isnan(mem[:,size:].float()).all()
    return errs
@pytest.mark.parametrize("case",CASES,ids=str)
def test(on_gpu,case):
    i=CASES.index(case)
    dtype,state=[(torch.float32,torch.float32),(torch.bfloat16,torch.float32),(torch.float16,torch.float16),(torch.bfloat16,torch.bfloat16)][i%4 if i%10>4 else 0]
    e=go(on_gpu,*case,dtype,state,length=(i%3)*2+2,drafts=[4,5,3][i%3]+0,seed=i)
    print(case,dtype,state,e)
    assert e[0]<(5e-6 if dtype==state==torch.float32 else 2e-2 if state!=torch.float32 else 4e-3)
    assert e[1]<(5e-6 if state==torch.float32 else 2e-2)
@pytest.mark.parametrize("decay",["raw","sigmoid","log","direct"])
@pytest.mark.parametrize("name",["wkv7","wkv6","gla"])
def test_decays(on_gpu,name,decay):
    e=go(on_gpu,name,"vk",12,20,torch.float32,torch.float32,5,4,3,decay=decay)
    print(name,decay,e)
    assert max(e)<5e-6
