bash .bench/rec.sh inference 2>&1 | tail -12
python - <<'P'
import zipfile,glob
for w in glob.glob('.bench/fla/*.whl'): zipfile.ZipFile(w).extractall('/tmp/pd')
P
export PYTHONPATH=$PWD:$PWD/tests:/tmp/pd RWKVJIT_CACHE_DIR=/tmp/rc RWKVJIT_CACHE_MAX_MB=8000
umask 077
python .bench/mut.py 120 2>&1 | tail -40
timeout 110 python -m bench ops --suite inference --json > $OUT/inference.json 2> $OUT/inference.err; echo bench $?; tail -5 $OUT/inference.err
