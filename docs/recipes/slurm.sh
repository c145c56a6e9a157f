#!/bin/bash
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --signal=TERM@120
# Of several GPUs a node, a worker takes one: --gpus-per-node=8 above and --mesh fsdp=8
# below make a worker of all eight.
srun python -m experiments.run --algo diloco --workers 4 --distributed auto \
    --init-timeout 300 --out "$SCRATCH/diloco-$SLURM_JOB_ID" \
    --checkpoint-every 100 --resume
code=$?
case "$code" in
  0 | 1 | 2 | 3 | 130) ;; # done, or it would end so again
  *) [ "${SLURM_RESTART_COUNT:-0}" -lt 20 ] && scontrol requeue "$SLURM_JOB_ID" ;;
esac
exit "$code"
