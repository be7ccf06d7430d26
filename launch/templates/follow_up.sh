# After the loss of a node Slurm cannot run this job again (its steps would wait for ever), so that a job of its own
# follows it: queued now, started when this one ends badly, cancelled when it ends well.
scontrol update JobId="$SLURM_JOB_ID" Requeue=0 >/dev/null 2>&1
if [ -n "${2:-}" ]; then
    was=$(scontrol show job --oneliner "$2" 2>/dev/null | sed -n 's/.* JobState=\([A-Z_]*\) .* ExitCode=\([0-9]*\):.*/\1 \2/p')
    case "$was" in # ended by a person, well, by bad input (2), by values that were not finite (3)
    CANCELLED* | COMPLETED* | 'FAILED 2' | 'FAILED 3') say "job $2 ended as $was: nothing to follow" && exit 0 ;;
    *) say "follows job $2 (${was:-no longer known}), try $try of @TRIES@" ;;
    esac
fi
if [ "$restart" -eq 0 ] && [ "$try" -lt @TRIES@ ]; then
    next=$(sbatch --parsable --dependency=afternotok:"$SLURM_JOB_ID" --kill-on-invalid-dep=yes \
        "$script" $((try + 1)) "$SLURM_JOB_ID") && say "job ${next%%;*} is queued to follow it, should it fail" ||
        say "no follow-up could be queued"
fi
