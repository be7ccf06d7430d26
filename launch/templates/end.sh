case "$code" in # a failure is told above what Slurm's signals give, as Slurm keeps the largest code (launch/task.py)
255) code=138 ;;
254) code=1 ;;
19[3-9] | 2[0-5][0-9]) code=$((code - 192)) ;;
esac
[ "$code" -ne 137 ] || say "a task was killed outright (SIGKILL), often for want of memory"
# 143: told to stop; a checkpoint is written where checkpoint.every asks for any. Slurm does not queue a job again that
# ends by itself in time.
if [ "$code" -eq 143 ]; then
    say "told to stop; it is queued again, and goes on from its newest checkpoint (checkpoint.every)"
    scontrol update JobId="$SLURM_JOB_ID" Requeue=1 >/dev/null 2>&1
    scontrol requeue "$SLURM_JOB_ID" && sleep 30 # Slurm ends this shell
fi
exit "$code"
