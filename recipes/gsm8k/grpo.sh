#!/usr/bin/env bash
# GRPO on GSM8K.  Further settings are passed on, e.g. `bash recipes/gsm8k/grpo.sh trainer.n_gpus_per_node=4`, `--cfg job`.
#   MODEL   Qwen/Qwen2.5-0.5B-Instruct by default; Qwen/Qwen2.5-7B-Instruct for the large run (8 GPUs, set TP=2)
#   DATA    folder with train.parquet and test.parquet (see preprocess.py)
set -euo pipefail
MODEL=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}
DATA=${DATA:-data/gsm8k}
TP=${TP:-1}

exec "${PYTHON:-python}" -m rlhub.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$DATA/train.parquet" \
    data.val_files="$DATA/test.parquet" \
    data.train_batch_size=1024 \
    data.max_prompt_length=512 \
    data.max_response_length=1024 \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.rollout.tensor_model_parallel_size="$TP" \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    trainer.project_name=gsm8k \
    trainer.experiment_name="grpo-$(basename "$MODEL")" \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    trainer.keep_best=val/pass@1 \
    trainer.max_actor_ckpt_to_keep=2 \
    trainer.total_epochs=15 \
    "$@"
