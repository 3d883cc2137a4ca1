# shellcheck shell=bash
# shellcheck disable=SC2154  # variables that are set above, by moe_exp/launch/slurm/submission.py
# The constant part of every sbatch file: loads modules, starts one launcher per node, handles SLURM's warning
# before the time limit, and decides what happens after the job.
#
# SLURM sends its warning (--signal=B:) to this shell only. A second job step, which overlaps the first, passes
# it to the launchers only; `scancel --signal` would reach every process of the step.

say() { printf '%s job %s: %s\n' "$(date '+%F %T')" "$SLURM_JOB_ID" "$*"; }

newest_checkpoint() {
    cat "$run_folder/checkpoints/latest_checkpointed_iteration.txt" 2>/dev/null || echo none
}

# Current host names of EXCLUDE_FILE, separated by commas, without domains as in SLURM.
excluded_hosts() {
    [ ! -r "$exclude_file" ] ||
        sed -E -e 's/#.*//' -e 's/[[:space:]]//g' -e '/^$/d' -e '/^[0-9.]+$/!s/\..*//' "$exclude_file" |
        sort -u | paste -sd, -
}

# Ids of this run's pending jobs, over all submissions; one id per job array.
pending_jobs() {
    comm -12 <(sort -u "$slurm_folder/submitted") \
        <(squeue --noheader --user="$(id -un)" --states=PENDING --format=%F | tr -d ' ' | sort -u)
}

cancel_rest() {
    local job
    for job in $(pending_jobs); do
        scancel --state=PENDING "$job" || say "job $job could not be canceled: run scancel --state=PENDING $job"
    done
}

# Excludes bad nodes from jobs that were submitted before the nodes were found to be bad.
exclude_for_rest() {
    local job hosts known
    [ -r "$exclude_file" ] || return 0
    hosts="$(excluded_hosts)"
    for job in $(pending_jobs); do
        scontrol update "JobId=$job" "ExcNodeList=$hosts" ||
            { known="$(known_hosts "$hosts")" && [ -n "$known" ] &&
                scontrol update "JobId=$job" "ExcNodeList=$known"; } ||
            say "could not exclude $hosts from all of job $job: see the messages above"
    done
}

# The given host names that SLURM knows: it rejects a list with a single unknown name.
known_hosts() {
    comm -12 <(tr , '\n' <<<"$1" | sort -u) <(sinfo --noheader --Node --format=%N | tr -d ' ' | sort -u) |
        paste -sd, -
}

on_excluded_node() {
    local host
    for host in "${hosts[@]}"; do
        [[ ",$(excluded_hosts)," != *",$host,"* ]] || return 0
    done
    return 1
}

# Runs on every node as its only task. $1: folder for notes; then the launcher's command. The launcher's exit
# code is written to a note, because srun would terminate the other nodes, which may still be saving, at the
# first nonzero code, and 75 (to be continued) is not a failure.
# shellcheck disable=SC2329  # called by another shell
on_node() {
    local notes="$1" code _
    shift
    export NODE_RANK="$SLURM_NODEID"
    # When the whole step gets a signal (scancel), this shell keeps waiting for the launcher, which receives
    # the signal with its default action.
    trap : TERM INT HUP USR1 USR2
    code=75
    if [ ! -e "$notes/stop" ]; then
        (
            echo "$BASHPID" >"$notes/$SLURM_NODEID.pid"
            exec "$@"
        )
        code=$?
    fi
    echo "$code" >"$notes/$SLURM_NODEID.part" && mv "$notes/$SLURM_NODEID.part" "$notes/$SLURM_NODEID.code"
    case "$code" in 0 | 75) exit 0 ;; esac
    for _ in {1..60}; do # gives the other nodes time to notice and to write their notes
        [ "$(find "$notes" -name '*.code' | wc -l)" -lt "$SLURM_NNODES" ] || break
        sleep 1
    done
    exit "$code"
}

# Runs on every node in the second step: makes the launcher save and exit with 75.
# shellcheck disable=SC2329  # called by another shell
report_exit_code() {
    local pid="$1/$SLURM_NODEID.pid"
    [ ! -e "$pid" ] || kill -USR1 "$(cat "$pid")" # not TERM: leaves time for a slow file system
}

# shellcheck disable=SC2329  # called by a trap
stop_launchers() {
    warned=true
    [ ! -e "$notes/stop" ] || return 0 # a second signal would kill the launcher's ranks
    say "warning from SLURM: saving and stopping the run"
    touch "$notes/stop"
    srun --overlap --nodes="$SLURM_NNODES" --ntasks-per-node=1 --export=ALL \
        bash -c "$(declare -f report_exit_code); report_exit_code \"\$@\"" report_exit_code "$notes" ||
        { say "second step failed: sending SIGUSR1 to all processes" && scancel --signal=USR1 "$SLURM_JOB_ID.0"; }
}

# Exit code of the first node's launcher, which is the result of the run.
outcome() { cat "$notes/0.code" 2>/dev/null || echo "${1/#0/1}"; }

# Number of consecutive failures at the same newest checkpoint; the file contains both.
count_failure() {
    local number=0 at='' now
    now="$(newest_checkpoint)"
    [ ! -r "$slurm_folder/failures" ] || read -r number at <"$slurm_folder/failures"
    [ "$at" = "$now" ] || number=0
    echo "$((number + 1)) $now" >"$slurm_folder/failures"
    echo $((number + 1))
}

# Waits before a retry, as a file server may be unavailable. SLURM's warning ends the wait, because a job can
# only requeue itself before it ends. Sleeps for one second at a time: a shell handles signals between commands.
pause() {
    local until=$((SECONDS + $1))
    while [ "$warned" = false ] && [ "$SECONDS" -lt "$until" ]; do sleep 1; done
}

after_failure() {
    local failures
    failures="$(count_failure)"
    say "failed with exit code $1, failure $failures of $max_failures without a new checkpoint"
    if [ "$failures" -ge "$max_failures" ]; then
        say "ending the job chain: see $slurm_folder/job$SLURM_JOB_ID.*.log"
        rm -f "$slurm_folder/failures"
        cancel_rest
        return
    fi
    if [ "$requeue" != true ] && [ -z "$(pending_jobs)" ]; then
        say "no further job is queued: run run_slurm.sh with the same settings to submit more"
        return
    fi
    say "waiting $((retry_seconds * failures)) s before the next attempt"
    pause "$((retry_seconds * failures))"
    if on_excluded_node && [ -n "$(pending_jobs)" ]; then
        say "one of its nodes is now excluded, but a requeued job would ignore that:" \
            "the next job continues"
    elif [ "$requeue" = true ]; then
        say "requeueing the job"
        scontrol requeue "$SLURM_JOB_ID" || say "SLURM refused to requeue the job: the next job, if any, continues"
    fi
}

# Writes one line per start and end of a job to jobs.log.
record() {
    local line
    line="$(say "$1 on ${hosts[0]}, checkpoint $(newest_checkpoint)")"
    echo "$line" >>"$slurm_folder/jobs.log"
}

# Acts on the launcher's exit code and ends this script.
conclude() {
    local code="$1"
    set +e # SETUP may have set -e and ended this script
    trap - EXIT TERM
    trap 'warned=true' USR1
    rm -rf "$notes"
    case "$code" in
        0)
            say "the run is finished; canceling the remaining jobs of the chain"
            record finished
            rm -f "$slurm_folder/failures"
            cancel_rest
            ;;
        75)
            say "to be continued"
            record "to be continued"
            [ -n "$(pending_jobs)" ] ||
                say "no further job is queued: run run_slurm.sh with the same settings to submit more"
            rm -f "$slurm_folder/failures"
            exclude_for_rest
            code=0 # for SLURM the job succeeded
            ;;
        2)
            say "invalid settings: ending the job chain"
            record "bad settings"
            cancel_rest
            ;;
        3)
            say "the failure would repeat: ending the job chain, see $slurm_folder/job$SLURM_JOB_ID.*.log"
            record "failed, would repeat"
            cancel_rest
            ;;
        *)
            record "failed with $code"
            exclude_for_rest
            after_failure "$code"
            ;;
    esac
    exit "$code"
}

notes="$slurm_folder/notes/$SLURM_JOB_ID"
rm -rf "$notes" && mkdir -p "$notes"
warned=false
trap stop_launchers USR1

mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
checkpoint_before="$(newest_checkpoint)"
say "starting on ${hosts[*]}, checkpoint $checkpoint_before, attempt $((${SLURM_RESTART_COUNT:-0} + 1))"
record starts

prepared=true
trap 'say "$setup ended this script"; conclude 1' EXIT
# EXIT also runs if a signal ends the shell: do not retry a canceled job as a failed one.
trap 'trap - EXIT; exit 143' TERM
set +u # module and SETUP files may use unset variables
if [ "${#modules[@]}" -gt 0 ]; then
    # `module` is a shell function, which is missing without the submitter's environment.
    # shellcheck source=/dev/null
    command -v module >/dev/null || source /etc/profile
    module load "${modules[@]}" || { say "module load ${modules[*]} failed" && prepared=false; }
fi
if [ -n "$setup" ] && [ "$prepared" = true ]; then
    # shellcheck source=/dev/null
    source "$setup" || { say "$setup ended with $?, the exit code of its last command" && prepared=false; }
fi
# With a `set -e` from SETUP, this script, and so the chain, would end at the first job that fails.
set +e -u -o pipefail
trap - EXIT TERM
[ "$prepared" = true ] || conclude 1

export MASTER_ADDR="${hosts[0]}"
# derived from the job id, because jobs may share a node; with a single node, the launcher picks a free port
[ "$SLURM_NNODES" -eq 1 ] || export MASTER_PORT="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}"

# In the background: a shell handles signals only between commands and in `wait`.
srun "${srun_options[@]}" --nodes="$SLURM_NNODES" --ntasks-per-node=1 --export=ALL \
    --kill-on-bad-exit=1 --wait=0 \
    --output="$slurm_folder/job%j.%N.log" --open-mode=append \
    bash -c "$(declare -f on_node); on_node \"\$@\"" on_node "$notes" "${launcher[@]}" &
launchers=$!
wait "$launchers"
code=$?
while kill -0 "$launchers" 2>/dev/null; do # a signal ended `wait`, but srun is still running
    wait "$launchers"
    code=$?
done
code="$(outcome "$code")"
# Settings that have trained are valid: a file server was unavailable, or the disk was full.
[ "$code" != 2 ] || [ "$checkpoint_before" = none ] || code=1
conclude "$code"
