# shellcheck shell=bash
# shellcheck disable=SC2154  # variables that are set above, by moe_exp/launch/slurm/batch_script.py
# The part that is the same in every sbatch file: modules, one launcher per node, the warning before the end,
# and what comes next.
#
# SLURM's warning (--signal=B:) goes to this shell alone, and from here to the launchers alone, by a second
# step that overlaps the first: `scancel --signal` would reach every process of the step.

say() { printf '%s job %s: %s\n' "$(date '+%F %T')" "$SLURM_JOB_ID" "$*"; }

newest_checkpoint() {
    cat "$run_folder/checkpoints/latest_checkpointed_iteration.txt" 2>/dev/null || echo none
}

# Host names of EXCLUDE_FILE as it is now, with commas; SLURM's names have no domain.
excluded_hosts() {
    [ ! -r "$exclude_file" ] ||
        sed -E -e 's/#.*//' -e 's/[[:space:]]//g' -e '/^$/d' -e '/^[0-9.]+$/!s/\..*//' "$exclude_file" |
        sort -u | paste -sd, -
}

# Ids of this run's jobs that have not started: of all submissions, and of a whole array one id.
pending_jobs() {
    comm -12 <(sort -u "$slurm_folder/submitted") \
        <(squeue --noheader --user="$(id -un)" --states=PENDING --format=%F | tr -d ' ' | sort -u)
}

cancel_rest() {
    local job
    for job in $(pending_jobs); do
        scancel --state=PENDING "$job" || say "job $job could not be cancelled: scancel --state=PENDING $job"
    done
}

# Jobs that were submitted before a node was found to be bad must not get it either.
exclude_for_rest() {
    local job hosts known
    [ -r "$exclude_file" ] || return 0
    hosts="$(excluded_hosts)"
    for job in $(pending_jobs); do
        scontrol update "JobId=$job" "ExcNodeList=$hosts" ||
            { known="$(known_hosts "$hosts")" && [ -n "$known" ] &&
                scontrol update "JobId=$job" "ExcNodeList=$known"; } ||
            say "not all of job $job could be made to leave out $hosts: see above"
    done
}

# Of host names with commas those that SLURM knows: it refuses a whole list for one that it does not.
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

# On every node, as its one task. $1: folder for notes; then the launcher. Its exit code goes into a note:
# srun would end the other nodes, which may still be saving, at the first code that is not 0, and 75 (to be
# continued) is no failure.
# shellcheck disable=SC2329  # called by another shell
on_node() {
    local notes="$1" code _
    shift
    export NODE_RANK="$SLURM_NODEID"
    # Of a signal to the whole step (scancel) this shell waits for the launcher's answer; the launcher gets it
    # with the default action.
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
    for _ in {1..60}; do # for the others to notice, and to write what they know
        [ "$(find "$notes" -name '*.code' | wc -l)" -lt "$SLURM_NNODES" ] || break
        sleep 1
    done
    exit "$code"
}

# On every node, in the second step: the launcher asks its ranks to save, and ends with 75.
# shellcheck disable=SC2329  # called by another shell
report_exit_code() {
    local pid="$1/$SLURM_NODEID.pid"
    [ ! -e "$pid" ] || kill -USR1 "$(cat "$pid")" # not TERM: there is time for a file system that stalls
}

# shellcheck disable=SC2329  # called by a trap
stop_launchers() {
    warned=true
    [ ! -e "$notes/stop" ] || return 0 # a second signal to a launcher kills its job
    say "SLURM's warning: the run saves and ends"
    touch "$notes/stop"
    srun --overlap --nodes="$SLURM_NNODES" --ntasks-per-node=1 --export=ALL \
        bash -c "$(declare -f report_exit_code); report_exit_code \"\$@\"" report_exit_code "$notes" ||
        { say "no second step: all processes get SIGUSR1" && scancel --signal=USR1 "$SLURM_JOB_ID.0"; }
}

# How the launcher of the first node has ended, which knows how the run has.
outcome() { cat "$notes/0.code" 2>/dev/null || echo "${1/#0/1}"; }

# Failures in a row with the same newest checkpoint, which stands behind their number.
count_failure() {
    local number=0 at='' now
    now="$(newest_checkpoint)"
    [ ! -r "$slurm_folder/failures" ] || read -r number at <"$slurm_folder/failures"
    [ "$at" = "$now" ] || number=0
    echo "$((number + 1)) $now" >"$slurm_folder/failures"
    echo $((number + 1))
}

# What has failed may be a file server that is away. SLURM's warning, earlier or meanwhile, ends the wait:
# little is left of the job, and one that is over cannot queue itself again. In steps of a second, as a shell
# answers signals only between commands.
pause() {
    local until=$((SECONDS + $1))
    while [ "$warned" = false ] && [ "$SECONDS" -lt "$until" ]; do sleep 1; done
}

after_failure() {
    local failures
    failures="$(count_failure)"
    say "failed with exit code $1, failure $failures of $max_failures without a new checkpoint"
    if [ "$failures" -ge "$max_failures" ]; then
        say "the chain ends here: see $slurm_folder/job$SLURM_JOB_ID.*.log"
        rm -f "$slurm_folder/failures"
        cancel_rest
        return
    fi
    if [ "$requeue" != true ] && [ -z "$(pending_jobs)" ]; then
        say "no job follows: run_slurm.sh with the same settings submits more"
        return
    fi
    say "waits $((retry_seconds * failures)) s before what comes next"
    pause "$((retry_seconds * failures))"
    if on_excluded_node && [ -n "$(pending_jobs)" ]; then
        say "one of its nodes is excluded now, which a job that is queued again does not follow:" \
            "the next job continues"
    elif [ "$requeue" = true ]; then
        say "goes back into the queue"
        scontrol requeue "$SLURM_JOB_ID" || say "which SLURM refuses: the next job continues, if there is one"
    fi
}

# One line per start and end of a job, for people.
record() {
    local line
    line="$(say "$1 on ${hosts[0]}, checkpoint $(newest_checkpoint)")"
    echo "$line" >>"$slurm_folder/jobs.log"
}

# What follows from an exit code, which is the launcher's: the end of this script.
conclude() {
    local code="$1"
    set +e # of SETUP, where it has ended this script
    trap - EXIT TERM
    trap 'warned=true' USR1
    rm -rf "$notes"
    case "$code" in
        0)
            say "the run has finished; what is left of the chain is cancelled"
            record finished
            rm -f "$slurm_folder/failures"
            cancel_rest
            ;;
        75)
            say "to be continued"
            record "to be continued"
            [ -n "$(pending_jobs)" ] ||
                say "but no job follows: run_slurm.sh with the same settings submits more"
            rm -f "$slurm_folder/failures"
            exclude_for_rest
            code=0 # for SLURM: a job that did what it should
            ;;
        2)
            say "the settings cannot run: the chain ends here"
            record "bad settings"
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
say "starts on ${hosts[*]}, checkpoint $checkpoint_before, attempt $((${SLURM_RESTART_COUNT:-0} + 1))"
record starts

prepared=true
trap 'say "$setup has ended this script"; conclude 1' EXIT
# A shell that a signal ends comes to EXIT, too: a job that is cancelled is no failure that is tried again.
trap 'trap - EXIT; exit 143' TERM
set +u # of files that others wrote
if [ "${#modules[@]}" -gt 0 ]; then
    # A function of the shell, which is not there without the submitter's environment.
    # shellcheck source=/dev/null
    command -v module >/dev/null || source /etc/profile
    module load "${modules[@]}" || { say "module load ${modules[*]} has failed" && prepared=false; }
fi
if [ -n "$setup" ] && [ "$prepared" = true ]; then
    # shellcheck source=/dev/null
    source "$setup" || { say "$setup ended with $?, the exit code of its last command" && prepared=false; }
fi
# SETUP may have set -e, with which this script would end at the first job that fails, and with it the chain.
set +e -u -o pipefail
trap - EXIT TERM
[ "$prepared" = true ] || conclude 1

export MASTER_ADDR="${hosts[0]}"
# by the job's number, as several may share a node; a single node takes a free one
[ "$SLURM_NNODES" -eq 1 ] || export MASTER_PORT="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}"

# In the background: a shell answers signals only between commands, and in `wait`.
srun "${srun_options[@]}" --nodes="$SLURM_NNODES" --ntasks-per-node=1 --export=ALL \
    --kill-on-bad-exit=1 --wait=0 \
    --output="$slurm_folder/job%j.%N.log" --open-mode=append \
    bash -c "$(declare -f on_node); on_node \"\$@\"" on_node "$notes" "${launcher[@]}" &
launchers=$!
wait "$launchers"
code=$?
while kill -0 "$launchers" 2>/dev/null; do # the signal has ended the wait, and not srun
    wait "$launchers"
    code=$?
done
code="$(outcome "$code")"
# Settings that have trained can run: a file server was away, the disk was full.
[ "$code" != 2 ] || [ "$checkpoint_before" = none ] || code=1
conclude "$code"
