#!/usr/bin/env bash
# Everything that needs a GPU, once, in under six minutes and without a network:
#
#     [PYTHON=python3] [OUT=gpu-check] tests/gpu_check.sh
#
# Runs the tests marked `gpu`, and measures copies, nvCOMP (does zlib read it, how fast is it by size and number
# of chunks, what holds up the host), kernels beside torch, overlap, and the stages of the codecs with kernels and
# without, the last beside what `kvtcd bench codec --predict` says of such a card. Leaves tests.txt, tests.xml, figures.json, codec.json and codec-no-kernels.json in OUT. Ends with 0 where there is no CUDA device, with 69 where wheels are missing (it names
# them), and with 1 where a test or a measurement failed.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=${OUT:-gpu-check}
export PYTHONPATH="$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}

ready=0
"$python" -m support.gpu_ready || ready=$?
case $ready in
  0) ;;
  3) exit 0 ;; # no device, and it has said so
  *) exit "$ready" ;;
esac
mkdir -p "$out"
out=$(cd "$out" && pwd)

failed=0
mapfile -t files < <(grep -rlE 'mark\.gpu|support\.pipelines import' tests --include='test_*.py' | sort)
echo "== tests marked gpu =="
timeout --kill-after=10 150 "$python" -m pytest -m gpu -q -W default -p no:cacheprovider --timeout 60 \
  --junitxml "$out/tests.xml" "${files[@]}" 2>&1 | tee "$out/tests.txt" || failed=1

echo "== figures =="
timeout --kill-after=10 105 "$python" -m support.gpu_figures "$out/figures.json" || failed=1

echo "== codecs =="
timeout --kill-after=10 60 "$python" -m kvtcd bench codec --device cuda --codec kvtc --codec kvtc2 \
  --p 14336 --rank 1024 --rank 2048 --seconds 15 --json "$out/codec.json" || failed=1
timeout --kill-after=10 35 "$python" -m kvtcd bench codec --device cuda --no-kernels --codec kvtc2 \
  --p 14336 --rank 1024 --seconds 5 --json "$out/codec-no-kernels.json" || failed=1

echo "left in $out:"
ls -l "$out"
exit "$failed"
