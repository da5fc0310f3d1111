#!/usr/bin/env bash
# Everything that needs a GPU, once, in under six minutes and without a network:
#
#     [PYTHON=python3] [OUT=gpu-check] [NVCOMP=no] [WHEELS=folder] tests/gpu_check.sh
#
# Runs the tests marked `gpu`, measures what has to be known of the device, and times the stages of the codecs, with
# kernels and graphs and without either, beside what `kvtcd bench codec --predict` says of such a card. NVCOMP=no leaves nvCOMP out;
# WHEELS is a folder with wheels of it, of CUDA 13 and 12, which are tried beside what is installed.
#
# What is to be known of a card that is new to us, and which part says it (`support/gpu_run.py`, the tests):
#
#      1 wheels      does nvCOMP's wheel of CUDA 13 load on this driver, else that of CUDA 12
#      2 exchanged   do zlib and nvCOMP read each other: both types of algorithm, 1 byte to 64 KiB, odd lengths
#      3 entropy     how nvCOMP's ratio compares with Huffman codes of zlib on codes; by size of chunks: speeds
#      4 speeds      GB/s of Deflate both ways by size and number of chunks; of GDeflate, Zstd and ANS beside it
#      5 manners     does a call return while the device is busy; does it let other threads run
#      6 manners     outputs that torch has allocated; what a table of 10,000 chunks takes
#      7 manners     may a list of arrays take the place of a batch
#      8 manners     does it write into pinned memory of the host, and read from there
#      9 copies      GB/s either way, pinned and not, of pinning, with huge pages and without; and within the card
#     10 kernels     Triton's kernels beside torch's operations, and whether both say the same codes
#     11 entropy     from how many chunks on the device is faster than a core
#     12 refused     is a flipped bit under a checksum refused before the device is given anything
#
# and lossless (thousands of chunks, parts on the way up), overlap, straight (decoding without the bus), versions; memory that runs out, a process that
# ends with 70, the device of a policy, the GPU tier: tests marked `gpu`.
#
# Leaves in OUT report.json, which has all of it, and what that is made of: tests.xml, tests.txt, figures.json (part by
# part as they end), codec.json, codec-no-kernels.json, codec-no-graphs.json. Ends with 0 if all of it ran and is as it has to be, or where
# there is no card; with 69 where something is missing (it says what, and how to bring it); with 1 where a part or a
# test has failed, nvCOMP does not work and is not left out, or the card cannot be used (it says why).
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=${OUT:-gpu-check}
export PYTHONPATH="$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}

ready=0
timeout --kill-after=5 15 "$python" -m support.gpu_ready || ready=$?
case $ready in
  0) ;;
  3) exit 0 ;; # no device, and it has said so
  *) exit "$ready" ;;
esac
mkdir -p "$out"
out=$(cd "$out" && pwd)
rm -f "$out"/{report,figures,codec,codec-no-kernels,codec-no-graphs}.json "$out"/tests.{xml,txt}

failed=0
step() { # a name, seconds, and a command that may fail, hang or crash: the others run all the same
  echo "== $1 =="
  local status=0
  timeout --kill-after=5 "$2" "${@:3}" || status=$?
  if [ "$status" -ne 0 ]; then
    echo "$1 ended with $status (124: after $2 s)"
    failed=1
  fi
}

figures=("$python" -m support.gpu_run "$out/figures.json")
step "copies and kernels" 30 "${figures[@]}" versions copies kernels
step "nvCOMP" 35 "${figures[@]}" wheels exchanged refused manners
step "chunks" 25 "${figures[@]}" entropy lossless
mapfile -t files < <(grep -rlE 'mark\.gpu|support\.pipelines import' tests --include='test_*.py' | sort)
step "tests marked gpu" 90 "$python" -m pytest -m gpu -q -W default -p no:cacheprovider --timeout 40 \
  --junitxml "$out/tests.xml" "${files[@]}" > >(tee "$out/tests.txt") 2>&1
bench=("$python" -m kvtcd bench codec --device cuda --rank 1024)
step "codecs" 55 "${bench[@]}" --codec kvtc --codec kvtc2 --p 14336 --p 32768 --seconds 12 --json "$out/codec.json"
step "codecs without kernels" 20 "${bench[@]}" --codec kvtc2 --p 14336 --seconds 3 --no-kernels \
  --json "$out/codec-no-kernels.json"
step "codecs without graphs" 20 "${bench[@]}" --codec kvtc2 --p 14336 --seconds 3 --no-graphs \
  --json "$out/codec-no-graphs.json"
step "overlap" 19 "${figures[@]}" overlap straight
step "speeds" 30 "${figures[@]}" speeds # last, since it takes the time that is left

step "report" 10 "$python" -m support.gpu_report "$out"
echo "left in $out:"
ls -l "$out"
exit "$failed"
