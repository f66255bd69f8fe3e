#!/usr/bin/env bash
# GSM8K end to end on a machine without a GPU: a sandbox server, SGLang with SmolLM2-135M-Instruct, `toolroll run` on a
# Ray cluster of two nodes, statistics of the records, and the viewer. The last line of the output has the figures.
#
#   TOOLROLL_GSM8K=gsm8k/test.jsonl tests/special_e2e/run_gsm8k_sgl_multiturn_sf_tool.sh
#
# Default of TOOLROLL_GSM8K: the questions of examples/verl_gsm8k. Requires tmux, and toolroll with the extras
# [ray,rollout,sandbox,records,viewer] in `python` (or PYTHON).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$here/../..
python=$(command -v "${PYTHON:-python3}")
toolroll=("$python" -m toolroll.cli)
problems=12 samples=2
data=${TOOLROLL_GSM8K:-$root/examples/verl_gsm8k/questions.jsonl}

work=$(mktemp -d /var/tmp/toolroll-e2e.XXXXXX) # not in /tmp, which is private to each sandboxed program
started=()
# tree PID: print the ids of the process and of all its descendants
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
  ends=$((SECONDS + 10)) # a Ray node would wait 30 s for detached actors before it kills them
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

log() { printf '%4ss  %s\n' "$SECONDS" "$*" >&2; }
free_port() { "$python" "$root/benchmarks/free_port.py"; }
# start NAME COMMAND…: run a command in the background until this script ends, with its output in NAME.log
start() {
  local log=$work/$1.log
  shift
  setpriv --pdeathsig TERM "$@" >"$log" 2>&1 &
  started+=($!)
  disown # keeps bash from reporting each killed job
}
# all_running: succeed if all background commands are running
all_running() {
  local pid
  for pid in "${started[@]}"; do kill -0 "$pid" 2>/dev/null || return 1; done
}
# wait_for NAME COMMAND…: wait until the command succeeds
wait_for() {
  local name=$1 ends=$((SECONDS + 300))
  shift
  until "$@" >/dev/null 2>&1; do
    { all_running && ((SECONDS < ends)); } || { log "$name did not start"; return 1; }
    sleep 0.5
  done
  log "$name is up"
}

log "preparing the engine and the model"
eval "$("$root/.ci/sglang" | sed 's/^/engine_/')"
export MODEL=$engine_model
sandbox_port=$(free_port) engine_port=$(free_port) ray_port=$(free_port)
export SANDBOX_FUSION_URL=http://127.0.0.1:$sandbox_port SGLANG_URL=http://127.0.0.1:$engine_port
export RAY_USAGE_STATS_ENABLED=0 RAY_AUTH_MODE=token RAY_memory_monitor_refresh_ms=0 # ignore the memory use of other programs
RAY_AUTH_TOKEN=$("$python" -c 'import secrets; print(secrets.token_hex(32))') && export RAY_AUTH_TOKEN
cluster=$("$python" -c 'import ray.util; print(ray.util.get_node_ip_address())'):$ray_port
ray=("$python" -m ray.scripts.scripts start --block --num-cpus=1 --num-gpus=0 --object-store-memory=80000000
  --include-log-monitor=false)
# nodes COUNT: succeed if the cluster has COUNT nodes
nodes() {
  "$python" - "$cluster" "$1" <<'PYTHON'
import sys

import ray

ray.init(sys.argv[1], log_to_driver=False, logging_level="error")
sys.exit(sum(node["Alive"] for node in ray.nodes()) != int(sys.argv[2]))
PYTHON
}
# join NAME COUNT OPTION…: start a Ray node, which is the COUNT-th of the cluster
join() {
  local name=$1 count=$2
  shift 2
  for _ in 1 2 3; do # Ray gives a node 30 s to start, which can be too short on a busy machine
    start "$name" "${ray[@]}" "$@"
    if wait_for "$name" nodes "$count"; then return; fi
    unset 'started[-1]'
  done
  return 1
}
join ray-head 1 --head --port="$ray_port" --include-dashboard=false --temp-dir="$work/ray"
join ray-node 2 --address="$cluster"
# Start the other servers only now, so that they do not slow down the nodes.
start sandbox "${toolroll[@]}" sandbox serve --port "$sandbox_port"
dtype=float32 # faster than bfloat16, unless the CPU has instructions for it
if grep -q avx512_bf16 /proc/cpuinfo; then dtype=bfloat16; fi
HF_HUB_OFFLINE=1 SGLANG_USE_CPU_ENGINE=1 OMP_NUM_THREADS=1 start sglang "$engine_python" -m sglang.launch_server \
  --model-path "$MODEL" --port "$engine_port" --device cpu --attention-backend torch_native --dtype "$dtype" \
  --mem-fraction-static 0.2 --max-total-tokens 65536 --max-running-requests 32 --context-length 4096 \
  --disable-overlap-schedule --sleep-on-idle
wait_for "the sandbox" curl -sf "$SANDBOX_FUSION_URL/v1/ping"
wait_for "SGLang" curl -sf "$SGLANG_URL/health"

log "running $problems problems of $data × $samples samples"
"$python" "$here/few_shot_prompts.py" "$data" "$problems" >"$work/problems.jsonl"
# `toolroll run` exits with 1 if all trajectories have infra faults.
"${toolroll[@]}" run "$here/gsm8k_on_cpu.yaml" --json "data.path=$work/problems.jsonl" "n=$samples" \
  "rollout_data_dir=$work/rollouts" "cluster=$cluster" >"$work/result.json"

log "reading the records"
"${toolroll[@]}" records stats "$work/rollouts" >&2
"${toolroll[@]}" records stats "$work/rollouts" --json >"$work/stats.json"

log "starting the viewer"
tmux=(tmux -L "toolroll-$$" -f /dev/null)
screen_shows() { "${tmux[@]}" capture-pane -p -t viewer | grep -q "$1"; }
"${tmux[@]}" new-session -d -s viewer -x 120 -y 40 "${toolroll[*]@Q} view ${work@Q}/rollouts; echo exited with \$?; sleep 60"
wait_for "the first screen" screen_shows "sample 1 of"
"${tmux[@]}" send-keys -t viewer n q
wait_for "the shell prompt" screen_shows "exited with 0"

"$python" "$here/check_run.py" "$work" "$problems" "$samples"
