if [ "$restart" -gt 0 ] && ! timeout 60 srun --export=ALL --ntasks-per-node=1 true; then
    say "Slurm cannot start steps in it after the loss of a node; sbatch $script goes on from the checkpoint"
    exit 1
fi
