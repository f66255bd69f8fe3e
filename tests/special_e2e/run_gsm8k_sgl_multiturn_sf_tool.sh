#!/usr/bin/env bash
# GSM8K from end to end, on a machine without a GPU: a sandbox server, SGLang with SmolLM2-135M-Instruct, `toolroll run`
# over a Ray cluster of two nodes, its records, their statistics, and the viewer on them. The last line has the figures.
#
#   TOOLROLL_GSM8K=gsm8k/test.jsonl tests/special_e2e/run_gsm8k_sgl_multiturn_sf_tool.sh
#
# Without TOOLROLL_GSM8K, the questions of examples/verl_gsm8k are taken. `python` (or PYTHON) must have
# toolroll[ray,rollout,sandbox,records,viewer]; tmux must be there.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$here/../..
python=$(command -v "${PYTHON:-python3}")
toolroll=("$python" -m toolroll.cli)
problems=64 samples=2
data=${TOOLROLL_GSM8K:-$root/examples/verl_gsm8k/questions.jsonl}

work=$(mktemp -d /var/tmp/toolroll-e2e.XXXXXX) # not below /tmp, which programs in the sandbox have of their own
started=()
# tree PID: the process, and all below it
tree() {
  local child
  for child in $(ps -o pid= --ppid "$1"); do tree "$child"; done
  echo "$1"
}
leave() {
  local status=$? pid ends
  trap - EXIT
  tmux -L "toolroll-$$" kill-server 2>/dev/null || true
  ((status == 0)) || tail -n 30 "$work"/*.log >&2
  for pid in "${started[@]}"; do kill "$pid" 2>/dev/null || true; done
  ends=$((SECONDS + 10)) # a node of Ray's waits half a minute for its detached actors, and takes them with it anyhow
  for pid in "${started[@]}"; do
    while kill -0 "$pid" 2>/dev/null && ((SECONDS < ends)); do sleep 0.2; done
    if kill -0 "$pid" 2>/dev/null; then
      # shellcheck disable=SC2046
      kill -KILL $(tree "$pid") 2>/dev/null || true
    fi
  done
  rm -rf "$work"
  exit "$status"
}
trap leave EXIT
trap 'exit 130' INT TERM

say() { printf '%4ss  %s\n' "$SECONDS" "$*" >&2; }
free_port() { "$python" "$root/benchmarks/free_port.py"; }
# start NAME COMMAND…: in the background, until this script ends, with its words in NAME.log
start() {
  local log=$work/$1.log
  shift
  setpriv --pdeathsig TERM "$@" >"$log" 2>&1 &
  started+=($!)
  disown # else bash tells of each that had to be killed
}
# all_run: whether everything that was started still runs
all_run() {
  local pid
  for pid in "${started[@]}"; do kill -0 "$pid" 2>/dev/null || return 1; done
}
# until_up NAME COMMAND…: wait until the command succeeds
until_up() {
  local name=$1 ends=$((SECONDS + 120))
  shift
  until "$@" >/dev/null 2>&1; do
    { all_run && ((SECONDS < ends)); } || { say "$name did not start"; return 1; }
    sleep 0.5
  done
  say "$name is up"
}

say "an engine and a model"
eval "$("$root/.ci/sglang" | sed 's/^/engine_/')"
export MODEL=$engine_model
sandbox_port=$(free_port) engine_port=$(free_port) ray_port=$(free_port)
export SANDBOX_FUSION_URL=http://127.0.0.1:$sandbox_port SGLANG_URL=http://127.0.0.1:$engine_port
start sandbox "${toolroll[@]}" sandbox serve --port "$sandbox_port"
HF_HUB_OFFLINE=1 SGLANG_USE_CPU_ENGINE=1 OMP_NUM_THREADS=1 start sglang "$engine_python" -m sglang.launch_server \
  --model-path "$MODEL" --port "$engine_port" --device cpu --attention-backend torch_native --dtype bfloat16 \
  --mem-fraction-static 0.2 --max-total-tokens 65536 --max-running-requests 32 --context-length 4096 \
  --disable-overlap-schedule --sleep-on-idle

export RAY_USAGE_STATS_ENABLED=0 RAY_AUTH_MODE=token RAY_memory_monitor_refresh_ms=0 # what else runs here is its own affair
RAY_AUTH_TOKEN=$("$python" -c 'import secrets; print(secrets.token_hex(32))') && export RAY_AUTH_TOKEN
cluster=$("$python" -c 'import ray.util; print(ray.util.get_node_ip_address())'):$ray_port
ray=("$python" -m ray.scripts.scripts start --block --num-cpus=1 --num-gpus=0 --object-store-memory=80000000
  --include-log-monitor=false)
# nodes COUNT: whether the cluster has so many
nodes() {
  "$python" - "$cluster" "$1" <<'PYTHON'
import sys

import ray

ray.init(sys.argv[1], log_to_driver=False, logging_level="error")
sys.exit(sum(node["Alive"] for node in ray.nodes()) != int(sys.argv[2]))
PYTHON
}
start ray-head "${ray[@]}" --head --port="$ray_port" --include-dashboard=false --temp-dir="$work/ray"
until_up "Ray's head" nodes 1
start ray-node "${ray[@]}" --address="$cluster"
until_up "Ray's second node" nodes 2
until_up "the sandbox" curl -sf "$SANDBOX_FUSION_URL/v1/ping"
until_up "SGLang" curl -sf "$SGLANG_URL/health"

say "$problems problems of $data × $samples samples"
"$python" "$here/led_prompts.py" "$data" "$problems" >"$work/problems.jsonl"
# `run` ends with 1 where nothing came of it but failures of the infrastructure.
"${toolroll[@]}" run "$here/gsm8k_on_cpu.yaml" --json "data.path=$work/problems.jsonl" "n=$samples" \
  "rollout_data_dir=$work/rollouts" "cluster=$cluster" >"$work/told.json"

say "the records"
"${toolroll[@]}" records stats "$work/rollouts" >&2
"${toolroll[@]}" records stats "$work/rollouts" --json >"$work/stats.json"

say "the viewer"
tmux=(tmux -L "toolroll-$$" -f /dev/null)
screen_shows() { "${tmux[@]}" capture-pane -p -t viewer | grep -q "$1"; }
"${tmux[@]}" new-session -d -s viewer -x 120 -y 40 "${toolroll[*]@Q} view ${work@Q}/rollouts; echo left with \$?; sleep 60"
until_up "the first screen" screen_shows "sample 1 of"
"${tmux[@]}" send-keys -t viewer n q
until_up "the shell again" screen_shows "left with 0"

"$python" "$here/check_run.py" "$work" "$problems" "$samples"
