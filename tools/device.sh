#!/usr/bin/env bash
# Run the lab on a GPU machine whose own packages are fixed: wheels lying in .whl/ and this tree are installed in a
# folder of their own, which goes first. Output files go to $OUT.
#
#   tools/device.sh warm ARM...                  compile these arms' kernels on all cores, before what is timed
#   tools/device.sh test [pytest arguments]      the suite with --device=cuda
#   tools/device.sh ab | bench | parity | ...    the command with these arguments, JSON beside
#   tools/device.sh python FILE [arguments]      a script
set -uo pipefail
cd "$(dirname "$0")/.."
site="${SITE:-$PWD/.site}"
OUT="${OUT:-$PWD/out}"
mkdir -p "$OUT"
export PYTHONPATH="$site" PYTHONUNBUFFERED=1 OUT
if [ ! -e "$site/.ready" ]; then
    compgen -G '.whl/*.whl' >/dev/null &&
        python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" .whl/*.whl
    mkdir -p "$site" && touch "$site/.ready"
fi
rm -rf "$site"/atlas_lab* build
python3 -m pip install -q --no-index --no-deps --no-build-isolation --no-compile --no-cache-dir --upgrade \
    --target "$site" . || exit
command="${1:?test, python, or a verb of atlas-lab}"
shift
case "$command" in
test) python3 -m pytest -q -p no:cacheprovider -p no:benchmark --device=cuda --dist loadgroup "$@" ;;
warm) python3 tools/warm.py sm_90a "$@" ;;
python) python3 "$@" ;;
*) python3 -m atlas_lab "$command" "$@" --json "$OUT/$command.json" ;;
esac
