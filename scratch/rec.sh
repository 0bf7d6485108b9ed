set -e
python - <<'P'
import zipfile,glob
for w in glob.glob('.bench/wheels/*.whl'): zipfile.ZipFile(w).extractall('/tmp/pd')
P
export PYTHONPATH=$PWD:$PWD/tests:/tmp/pd RWKVJIT_CACHE_DIR=/tmp/rc RWKVJIT_CACHE_MAX_MB=8000
umask 077

nvidia-smi --query-gpu=name,driver_version --format=csv
python -m pytest -p no:cacheprovider tests/gpu -k "$1" -n 20 -q --record 2>&1 | tail -30
cp tests/gpu/record.json $OUT/record.json
