import subprocess, shutil, os, sys, pathlib, time
root=pathlib.Path.cwd(); T="kernel_templates/"
U,A,H=T+"inference/update.cuh",T+"inference/arrange_sequences.cu",T+"inference/update_states.cu"
P=T+"shared/pooled.cuh"; C=T+"shared/copy_states.cu"
M=[ # name, file, old, new, tests
("null rows are read",A,"(is_given && slot <= null_index) || slot < 0","slot < 0","tests/gpu/test_varlen.py -k slot"),
("past the pool",A,"|| slot >= slots ? -1","? -1","tests/gpu/test_varlen.py -k slot"),
("has_initial_state ignored",A,"has_initial_state == nullptr || has_initial_state[sequence] != 0 ? slot : -1","slot","tests/gpu/test_varlen.py -k zeros"),
("num_active ignored",A,"num_active != nullptr ? min(max(i64(*num_active), i64(0)), sequences) : sequences","sequences","tests/gpu/test_varlen.py -k active"),
("written where read",A,"legal(write_indices[sequence], true) : slot","slot : slot","tests/gpu/test_varlen.py -k there"),
("checkpoint not from the one before",A,"done = next, from = to, ++wave","done = next, ++wave","tests/gpu/test_varlen.py -k checkpoints"),
("offsets may fall",A,"next > done && next <= end","next <= end","tests/gpu/test_varlen.py -k checkpoints"),
("tail not zeroed",H,"write_zeros(end + row * share, min(end + (row + 1) * share, tokens));","","tests/gpu/test_varlen.py -k values_states"),
("first slot of another",P,"const int slot = pieces[sequence].read;","const int slot = pieces[sequence].write;","tests/gpu/test_varlen.py -k there"),
("no skip",P,"return POOLED && pieces[sequence].wave != wave;","return false;","tests/gpu/test_varlen.py -k there"),
("copy from the wrong slot",C,"FROM_POOL ? piece.read * slot_stride","FROM_POOL ? piece.write * slot_stride","tests/gpu/test_varlen.py -k segments"),
("copy to none",C,"(piece.wave != wave || piece.write < 0)","(piece.wave != wave)","tests/gpu/test_varlen.py -k segments"),
("w0 not added",U,"decay_factor<DECAY>(has_w0 ? x + to_float(w0.held[n]) : x)","decay_factor<DECAY>(x)","tests/gpu/test_update.py -k added"),
("scale",U,"from_float<T_IO>(scale * sum)","from_float<T_IO>(sum)","tests/gpu/test_update.py -k values and linear_attention"),
("slot stride",H,"state + from * slot_stride + of_head, first_value);\n\n","state + from * (heads * VALUE_SIZE * HEAD_SIZE) + of_head, first_value);\n\n","tests/gpu/test_update.py -k stride"),
("random halves",U,"word >> (place % 2 * 16) & 0xffffu","word & 0xffffu","tests/gpu/test_update.py -k rounded_or_rounding"),
("seed",U,"key = seed, other_key = seed >> 32","key = 1, other_key = 0","tests/gpu/test_update.py -k rounded_or_rounding_or_seeds"),
("subnormals",U,"< 0x38800000u","< 0x00800000u","tests/gpu/test_update.py -k rounded_or_rounding"),
("draws by slot",H,"(to * heads + head) * TILES_OF_HEAD","(row * heads + head) * TILES_OF_HEAD","tests/gpu/test_update.py -k rounded_or_rounding"),
("sums of warps",U,"sum_placeholder","", ""),
("bonus",U,"BONUS ? u[j] * r[j] * k[j] : r[j] * k[j]","r[j] * k[j]","tests/gpu/test_update.py -k values"),
]
end=time.time()+float(sys.argv[1])
for name,f,old,new,tests in [M[10],M[11],M[17],M[18],M[20]]:
    if not tests or time.time()>end: continue
    d=pathlib.Path("/tmp/mut"); shutil.rmtree(d,ignore_errors=True)
    shutil.copytree(root,d,ignore=shutil.ignore_patterns(".git",".bench"))
    s=(d/f).read_text()
    if s.count(old)!=1: print("??",name,s.count(old)); continue
    (d/f).write_text(s.replace(old,new))
    env={**os.environ,"PYTHONPATH":f"{d}:{d}/tests:/tmp/pd"}
    cmd=tests.split(" -k "); args=[cmd[0]]+(["-k",cmd[1].replace("_or_"," or ")] if len(cmd)>1 else [])
    t=time.time()
    r=subprocess.run([sys.executable,"-m","pytest","-p","no:cacheprovider","-q","-n","12","--maxfail=2",*args],cwd=d,env=env,capture_output=True,text=True)
    print(f"{name}: {'CAUGHT' if ' failed' in r.stdout else 'MISSED '+str(r.returncode)} {[l for l in r.stdout.splitlines() if l.strip()][-1][:90]} {time.time()-t:.0f}s",flush=True)
