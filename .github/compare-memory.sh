#!/usr/bin/env bash
# Runs a program at two commits of the checkout in the current folder, and compares its peak GPU memory.
# action.yml and tests/process/test_compare_memory.py call it. Its input is in the environment:
#   PROGRAM     a script with its arguments, or -m MODULE ...; words as a shell would split them
#   BASE        the commit to compare with
#   GPU         the GPU to predict for; empty: record on the GPU, or on vram's own devices
#   STEPS, FAIL_ABOVE, PREPARE   see action.yml; each may be empty
#   FOLDER      where the recordings and the report go; it must lie outside the checkout
set -euo pipefail

[ -n "${PROGRAM:-}" ] || { echo "compare-memory: name the program to run" >&2; exit 2; }
[ -n "${BASE:-}" ] || { echo "compare-memory: name the commit to compare with (the input base)" >&2; exit 2; }
mkdir -p "$FOLDER"
declare -a program
eval "program=($PROGRAM)"
head=$(git rev-parse HEAD)
branch=$(git symbolic-ref --quiet --short HEAD || echo "$head")
git cat-file -e "$BASE^{commit}" 2>/dev/null || git fetch --quiet --depth 1 origin "$BASE"

# Both commits are checked out in the same folder, so that files have the same names in both recordings.
measure() {
  git checkout --quiet --detach "$1"
  [ -z "${PREPARE:-}" ] || bash -euo pipefail -c "$PREPARE"
  if [ -n "${GPU:-}" ]; then
    local status=0
    vram predict --gpu "$GPU" ${STEPS:+--steps "$STEPS"} --save "$2" -- "${program[@]}" || status=$?
    ((status <= 1)) || return "$status" # 1: it does not fit, which the comparison shows as well
  else
    vram run --record "$2" "${program[@]}"
  fi
}

trap 'git checkout --quiet "$branch"' EXIT
echo "== base: $BASE"
measure "$BASE" "$FOLDER/base.vtrace"
echo "== head: $head"
measure "$head" "$FOLDER/head.vtrace"

status=0
vram diff "$FOLDER/base.vtrace" "$FOLDER/head.vtrace" ${FAIL_ABOVE:+--fail-above "$FAIL_ABOVE"} --markdown \
  >"$FOLDER/report.md" || status=$?
((status <= 1)) || exit "$status"
{
  echo
  echo "\`${PROGRAM//\`/}\`, ${GPU:+predicted for $GPU, }$(git rev-parse --short "$BASE") → $(git rev-parse --short "$head")"
} >>"$FOLDER/report.md"
cat "$FOLDER/report.md"
[ -z "${GITHUB_STEP_SUMMARY:-}" ] || cat "$FOLDER/report.md" >>"$GITHUB_STEP_SUMMARY"
failed=$([ "$status" = 1 ] && echo true || echo false)
if [ -n "${GITHUB_OUTPUT:-}" ]; then
  printf 'report=%s\nfailed=%s\n' "$FOLDER/report.md" "$failed" >>"$GITHUB_OUTPUT"
else
  exit "$status"
fi
