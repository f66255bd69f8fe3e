# Sourced by the scripts that build an environment once per machine, in a cache. They set `name` and `recipe`, the files
# that the result depends on, and define `build DIRECTORY`.
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
cache=${TOOLROLL_CI_CACHE:-/var/cache/toolroll-ci}
# uv unpacks each wheel once for all environments and links its files.
export UV_CACHE_DIR=$cache/uv UV_FIND_LINKS=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}

# new_environment DIRECTORY: create an empty environment
new_environment() {
  "$python" -m venv "$1"
  "$1/bin/python" -m pip install --quiet --quiet uv
}

# install DIRECTORY REQUIREMENT…: install into an environment
install() {
  local bin=$1/bin
  shift
  "$bin/uv" pip install --quiet --python "$bin/python" "$@"
}

packages_of() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

# build_once: set `made` to the directory of the result, after building it unless it exists
build_once() {
  local version key half
  version=$("$python" -c 'import sys; print("py%d.%d" % sys.version_info[:2])')
  key=$(cd "$here" && cat environment.sh "${recipe[@]}" | sha256sum | cut -c1-12)
  made=$cache/$name-$version-$key
  mkdir -p "$cache"
  exec 9>"$cache/.$name.lock"
  flock 9 # one build at a time; the kernel releases the lock when the process ends
  if [[ ! -d $made ]]; then
    # Build under a temporary name, so that the remains of a killed build are never used.
    half=$cache/.incomplete-$name
    rm -rf "$half"
    mkdir "$half"
    build "$half" >&2
    mv "$half" "$made"
  fi
}
