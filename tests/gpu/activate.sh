# For a GPU machine without a network: make staged packages importable in this shell.
#
#     source tests/gpu/activate.sh FOLDER
#
# FOLDER/wheels has wheels of what the machine lacks, and FOLDER/*.tar.* archives of a vLLM that was cut
# to what one GPU needs. Both are optional. vLLM is unpacked into VLLM_PATH, which is not on PYTHONPATH,
# since the tests run without it. Run it in the checkout.

_staged=$(cd "${1:?the staging folder}" && pwd)
_site=${PAGETWIN_SITE:-/tmp/pagetwin_site}
if [ ! -e "$_site/complete" ]; then
  mkdir -p "$_site/tools" "$_site/vllm"
  if [ -d "$_staged/wheels" ]; then
    python3 -m pip install -q --no-index --no-deps --no-compile --target "$_site/tools" \
      "$_staged"/wheels/*.whl
  fi
  for _archive in "$_staged"/*.tar.*; do
    [ -e "$_archive" ] || continue
    # Python reads every compression, also on a machine that has no xz
    python3 -c 'import sys, tarfile
with tarfile.open(sys.argv[1]) as archive:
    archive.extractall(sys.argv[2], filter="fully_trusted")' "$_archive" "$_site/vllm"
  done
  touch "$_site/complete"
  # otherwise each process compiles the files that it imports
  (setsid python3 -m compileall -q -j 0 "$_site" >/dev/null 2>&1 &)
fi

export PYTHONPATH=$PWD/.typing:$PWD/tests:$_site/tools${PYTHONPATH:+:$PYTHONPATH} VLLM_PATH=$_site/vllm
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# where containers put the driver's libraries
export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}/usr/local/nvidia/lib64
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
# kernels of other libraries that `pagetwin bench` and the adapters compare with
_fa3=$(find "$_site" -name '_vllm_fa3_C*.so' -print -quit)
_fa4=$(find "$_site" -name 'flash_attention_4.so' -print -quit)
_flashmla=$(find "$_site" -name '_flashmla_C*.so' -print -quit)
if [ -n "$_fa3" ]; then export PAGETWIN_FA3=$_fa3; fi
if [ -n "$_fa4" ]; then export PAGETWIN_FA4=$_fa4; fi
if [ -n "$_flashmla" ]; then export PAGETWIN_FLASHMLA=$_flashmla; fi
