#!/usr/bin/env bash
# PPO with a critic on GSM8K.  Further settings are passed on, e.g. `bash recipes/gsm8k/ppo.sh trainer.n_gpus_per_node=4`.
#   MODEL   the policy, Qwen/Qwen2.5-0.5B-Instruct by default; Qwen/Qwen2.5-7B-Instruct for the large run (8 GPUs, set TP=2)
#   CRITIC  the value model's start, by default the policy's
#   DATA    folder with train.parquet and test.parquet (see preprocess.py)
set -euo pipefail
MODEL=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}
CRITIC=${CRITIC:-$MODEL}
DATA=${DATA:-data/gsm8k}
TP=${TP:-1}

exec "${PYTHON:-python}" -m rlhub.trainer.main_ppo \
    algorithm.adv_estimator=gae \
    algorithm.use_kl_in_reward=True \
    algorithm.kl_ctrl.kl_coef=0.001 \
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
    actor_rollout_ref.rollout.tensor_model_parallel_size="$TP" \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \
    critic.model.path="$CRITIC" \
    critic.optim.lr=1e-5 \
    trainer.project_name=gsm8k \
    trainer.experiment_name="ppo-$(basename "$MODEL")" \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    trainer.keep_best=val/pass@1 \
    trainer.max_actor_ckpt_to_keep=2 \
    trainer.total_epochs=15 \
    "$@"
