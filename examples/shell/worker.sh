#!/usr/bin/env bash
# A worker that borrows devices with Kafka's console clients and jq, which it finds on PATH.
# Arguments: BOOTSTRAP HOST WORKER RESOURCE=AMOUNT [LEASE_SECONDS]
set -u

WORDS='{"allocated": "yours", "allocated superseded": "over", "ended": "over",
        "releasing": "over", "releasing failed": "failed", "failed": "failed"} as $words |
  if .type != "allocation" then "skip"
  else $words["\(.state) \(.outcome)"] // $words["\(.state) \(.reason_code)"] // $words[.state] // "waiting" end'

# What a record means for the worker with the key $1. $2 is the record's key, $3 its body.
status() {
  if [ "$1" != "$2" ]; then echo skip # another worker's, another run's, or a manager's own (@...)
  elif [ "$3" = null ]; then echo over # the console's word for a tombstone
  else jq -rn "[inputs][0] | $WORDS" <<<"$3" 2>/dev/null || echo skip; fi # unreadable: no record of ours
}

# Sets `now`, in hundredths of a second since boot: most clocks stand still while the machine is suspended, and the
# lease does not. While nothing happens to this worker, the loop has no command substitution: bash 5.2 may lose a signal
# that comes while it parses one.
read_clock() { read -r uptime _ </proc/uptime && now=${uptime/./}; }

# Counts from when we began to send the last message that was acknowledged in time.
lease=0 alive_at=0 # hundredths of a second; a lease of 0: none
is_lost() { [ "$lease" -gt 0 ] && [ "$1" -ge $((alive_at + lease)) ]; }
acknowledge() { # $1: when it was sent, $2: now. Once the lease is lost, somebody else may have the devices
  is_lost "$2" || [ "$1" -lt "$alive_at" ] || alive_at=$1
}

main() {
  local bootstrap=$1 host=$2 worker=$3 resource=${4%=*} amount=${4#*=} asked=${5:-30}
  local cluster=${OUTFITTER_CLUSTER:-outfitter} line='' part word key body run own now left within sent_at
  run=$(</proc/sys/kernel/random/uuid) own=$host/$worker/$run

  # Publishes the fields $1 within $2 seconds. The key is the host, by which the producer finds the partition.
  publish() {
    jq -nrc --arg host "$host" --arg worker "$worker" --arg run "$run" \
      "$1 + {\$host, \$worker, incarnation: \$run} | \"\(\$host)|\(.)\"" |
      timeout "$2" console-producer --sync --bootstrap-server "$bootstrap" --topic "$cluster.registrations" \
        --reader-property parse.key=true --reader-property 'key.separator=|' >/dev/null 2>&1
  }
  leave() { # once it is over, deregistering changes nothing
    echo "${*:2}"
    publish '{type: "deregister", reason: "the worker ends"}' 10
    kill "$consumer" 2>/dev/null
    exit "$1"
  }

  # A compacted topic may be read from its beginning: our answer is the last record of our key.
  exec {records}< <(exec console-consumer --bootstrap-server "$bootstrap" --topic "$cluster.allocations" \
    --from-beginning --isolation-level read_committed --formatter-property print.key=true \
    --formatter-property key.separator=' ' 2>/dev/null)
  local consumer=$! stopping=''
  trap 'stopping=1' TERM INT
  read_clock && alive_at=$now sent_at=$now
  local wanted="{amount: $amount, where: ${WHERE:-null}}" # which devices, as JSON
  publish "{type: \"register\", resources: {\"$resource\": $wanted}, lease_s: $asked}" 30 ||
    leave 1 "failed: the registration was not acknowledged"
  while read_clock || leave 1 "failed: /proc/uptime cannot be read"; [ -z "$stopping" ]; do
    if [ "$lease" -gt 0 ] && ! is_lost "$now" && [ "$now" -ge $((sent_at + lease / 3)) ]; then
      sent_at=$now left=$((alive_at + lease - now < lease / 3 ? alive_at + lease - now : lease / 3))
      printf -v within '%d.%02d' $(((left + 1) / 100)) $(((left + 1) % 100)) # BusyBox's timeout takes no other form
      publish '{type: "heartbeat"}' "$within" && read_clock && acknowledge "$sent_at" "$now"
      read_clock
    fi
    is_lost "$now" && leave 1 "lost: no heartbeat was acknowledged for a whole lease"
    IFS= read -r -t 0.2 -u "$records" part
    case $? in
      0) line+=$part key=${line%% *} body=${line#* } line='' word=skip # a whole line
        [ "$key" != "$own" ] || word=$(status "$own" "$key" "$body") ;;
      1) leave 1 "lost: the consumer has ended" ;;
      *) line+=$part word=skip ;; # none yet, or a part
    esac
    case $word in
      over | failed) leave 1 "$word $(jq -r .reason <<<"$body")" ;; # the devices are no longer ours
      waiting | yours)
        [ -z "${WHERE-}" ] || jq -e '.state != "allocated" or .request.choices' <<<"$body" >/dev/null ||
          leave 1 "failed: the manager ignores where"
        echo "$word $(jq -r 'if .state == "allocated" then .resources | tojson else .reason end' <<<"$body")"
        lease=$(jq '(.request.lease_s // 0) * 100 | floor' <<<"$body") ;;
    esac
  done
  leave 0 "released"
}

[ "${BASH_SOURCE[0]}" != "$0" ] || main "$@" # else a test wants the functions alone
