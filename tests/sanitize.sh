#!/usr/bin/env bash
# Run the tests of the compiled libraries under sanitizers: `make sanitize`.
#
# Each run has a copy of the tree in build/sanitize, with libraries compiled for it; Python finds the copy first. No
# leaks are looked for: Python and torch have their own. ThreadSanitizer cannot see how libgomp orders torch's threads, so
# what they do is passed by; our own team is looked at.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$PWD/.venv/bin/python
run=(setarch --addr-no-randomize "$python") # ThreadSanitizer wants it so
loads="from gptserve.engine.backends.cpu import native; from gptserve.engine.backends.cpu.attention import CpuAttention
assert native.is_available() and CpuAttention.is_available(), 'the libraries do not load'"
tests=(tests/engine/backends/cpu tests/engine/sampling tests/engine/model/test_linear.py)
tests+=(tests/engine/runner/test_{logprobs,memory_ahead,program_steps,sampler}.py)

# sanitized FLAGS RUNTIME..: the tests, with the libraries compiled with -fsanitize=FLAGS and these libraries of GCC.
sanitized() {
  local copy=build/sanitize/$1 flags="-fsanitize=$1 -fno-sanitize-recover=all" runtimes=
  shift
  for library; do runtimes+="$("${CXX:-g++}" -print-file-name="lib$library.so") "; done
  rm -rf "$copy" && mkdir -p "$copy"
  git ls-files -z | xargs -0 cp --no-dereference --parents --target-directory "$copy"
  cd "$copy"
  sed -i 's/"-g0"/"-g1"/; s/"-O3"/"-O1"/' setup.py # reports name lines; GCC is done in minutes
  CXXFLAGS=$flags LDFLAGS=$flags "$python" setup.py --quiet build_ext --inplace
  for library in engine/backends/cpu/_*.so; do
    nm --dynamic "$library" | grep "__[atu]*san_" > /dev/null || { echo "$library is not sanitized" >&2; exit 1; }
  done
  export LD_PRELOAD=$runtimes
  "${run[@]}" -c "$loads"
  "${run[@]}" -m pytest --capture=sys -p no:cacheprovider "${tests[@]}" # so captured, reports are seen
  unset LD_PRELOAD
  cd ../../..
}

export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
mkdir -p build/sanitize && echo race:gomp_thread_start > build/sanitize/passed_by
export TSAN_OPTIONS="suppressions=$PWD/build/sanitize/passed_by die_after_fork=0"
sanitized address,undefined,float-cast-overflow asan ubsan stdc++
sanitized thread tsan
