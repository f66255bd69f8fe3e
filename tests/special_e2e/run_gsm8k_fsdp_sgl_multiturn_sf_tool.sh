#!/usr/bin/env bash
# GRPO on GSM8K with a code interpreter: verl with FSDP and SGLang, on one machine with GPUs.
# Run it in verl's environment, with toolroll[rollout,sandbox] installed there. Arguments are passed on to verl.
#
#   TRAIN=gsm8k/train.jsonl VAL=gsm8k/test.jsonl GPUS=8 tests/special_e2e/run_gsm8k_fsdp_sgl_multiturn_sf_tool.sh
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
example=$root/examples/verl_gsm8k
python=${PYTHON:-python3}
model=${MODEL:-Qwen/Qwen2.5-3B-Instruct}
gpus=${GPUS:-8}
train=${TRAIN:-$example/questions.jsonl} # JSON lines in the format of GSM8K
val=${VAL:-$train}
work=${WORK:-/tmp/verl_gsm8k}

"$python" "$example/prepare.py" "$train" "$work/train.parquet" --split train
"$python" "$example/prepare.py" "$val" "$work/val.parquet" --split test

if [[ -z ${SANDBOX_FUSION_URL:-} ]]; then
  export SANDBOX_FUSION_URL=http://127.0.0.1:8080
  "$python" -m toolroll.cli sandbox serve --sessions 1024 >"$work/sandbox.log" 2>&1 &
  trap 'kill %1' EXIT
fi

# Use the trainer that excludes samples with infra faults; verl 0.8 has a separate module for it.
trainer=verl.trainer.main_ppo
if [[ $("$python" -W ignore -c 'from importlib.metadata import version; print(version("verl"))') == 0.8.* ]]; then
  trainer=verl.trainer.main_ppo_sync
fi

"$python" -m "$trainer" \
  algorithm.adv_estimator=grpo \
  algorithm.use_kl_in_reward=False \
  data.train_files="$work/train.parquet" \
  data.val_files="$work/val.parquet" \
  data.train_batch_size=64 \
  data.max_prompt_length=1024 \
  data.max_response_length=4096 \
  data.filter_overlong_prompts=True \
  data.truncation=error \
  data.return_raw_chat=True \
  actor_rollout_ref.model.path="$model" \
  actor_rollout_ref.model.external_lib=toolroll.integrations.verl \
  actor_rollout_ref.model.use_remove_padding=True \
  actor_rollout_ref.model.enable_gradient_checkpointing=True \
  actor_rollout_ref.actor.strategy=fsdp \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=64 \
  actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
  actor_rollout_ref.actor.use_kl_loss=True \
  actor_rollout_ref.actor.kl_loss_coef=0.001 \
  actor_rollout_ref.actor.kl_loss_type=low_var_kl \
  actor_rollout_ref.actor.entropy_coeff=0 \
  actor_rollout_ref.actor.fsdp_config.param_offload=True \
  actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \
  actor_rollout_ref.ref.fsdp_config.param_offload=True \
  actor_rollout_ref.rollout.name=sglang \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.calculate_log_probs=True \
  actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \
  actor_rollout_ref.rollout.multi_turn.enable=True \
  actor_rollout_ref.rollout.multi_turn.max_assistant_turns=8 \
  actor_rollout_ref.rollout.multi_turn.max_parallel_calls=4 \
  actor_rollout_ref.rollout.multi_turn.tool_config_path="$example/tool_config.yaml" \
  actor_rollout_ref.rollout.agent.default_agent_loop=toolroll \
  actor_rollout_ref.rollout.agent.agent_loop_config_path="$example/agent_loop.yaml" \
  trainer.logger='["console"]' \
  trainer.project_name=toolroll \
  trainer.experiment_name=gsm8k_code_interpreter \
  trainer.rollout_data_dir="$work/dumps" \
  trainer.val_before_train=False \
  trainer.n_gpus_per_node="$gpus" \
  trainer.nnodes=1 \
  trainer.save_freq=-1 \
  trainer.test_freq=20 \
  trainer.total_epochs=1 \
  "$@"
