python - <<'P'
import zipfile,glob
for w in glob.glob('.bench/wheels/*.whl'): zipfile.ZipFile(w).extractall('/tmp/pd')
P
export RWKVJIT_CACHE_DIR=/tmp/rc RWKVJIT_CACHE_MAX_MB=8000
umask 077
R=$PWD
PYTHONPATH=$R:$R/tests:/tmp/pd timeout 40 python -m pytest -p no:cacheprovider tests/gpu -k "segments_read or states_are_rounded" -n 8 -q 2>&1 | tail -4
cd .bench/replay
PYTHONPATH=$PWD:$PWD/tests:/tmp/pd timeout 80 python -m pytest -p no:cacheprovider tests/gpu/test_replay.py -n 14 -q --maxfail=6 2>&1 | grep -v Warning | tail -30
PYTHONPATH=$PWD:/tmp/pd timeout 60 python $R/.bench/replay_bench.py 2>&1 | tail -30
cd $R
PYTHONPATH=$R python .bench/mut.py 50 2>&1 | tail
