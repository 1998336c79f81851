#!/usr/bin/env bash
# A run on four machines of eight GPUs under Slurm: sbatch apps/trainer/launch/slurm.sh
# It goes on in the next job when time is over, and after a crash: the command is the same each time.
#SBATCH --job-name=olmo
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
#SBATCH --signal=B:USR1@900

set -euo pipefail

# On a file system that all machines share.
RUN="${RUN:-$PWD/runs/medium-64e/slurm}"
RECIPE="${RECIPE:-medium-64e}"

# Fifteen minutes before the end: save and stop. `srun` runs beside the shell, which can hear it so.
trap 'touch "$RUN/stop"' USR1
mkdir -p "$RUN"

# Each start of the processes gets a store of its own, without the addresses of those before.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
head_node="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"

srun --kill-on-bad-exit=1 uv run torchrun \
  --nnodes "$SLURM_JOB_NUM_NODES" \
  --nproc-per-node 8 \
  --rdzv-backend c10d \
  --rdzv-endpoint "$head_node:29400" \
  --rdzv-id "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \
  --max-restarts 3 \
  apps/trainer "$RECIPE" --continue \
  --set "run.folder=$RUN" \
  --set run.save_every=500 \
  --set run.keep_last=3 \
  --set run.keep_every=10000 &

# A trapped signal ends `wait`, not the job: wait on.
job=$!
code=0
wait "$job" || code=$?
while kill -0 "$job" 2>/dev/null; do
  code=0
  wait "$job" || code=$?
done

# Stopped as asked, or a machine broke: the same job once more. Code 2 is wrong input: no use.
if [ -e "$RUN/stop" ] || { [ "$code" -ne 0 ] && [ "$code" -ne 2 ]; }; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
