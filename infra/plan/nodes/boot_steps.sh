# What follows is the same on all machines; the lines above are the cluster's. Here are the steps of a first boot: each has an end,
# and what failed is counted. The outcome is the first word of /var/lib/lustrain/boot: ready, or failed and the step.

# A test gives a folder that stands for /, and waits that do not wait.
root="${LUSTRAIN_ROOT:-}"
pause="${LUSTRAIN_PAUSE_SECONDS:-10}"
patience="${LUSTRAIN_STEP_SECONDS:-600}"
outcome="$root/var/lib/lustrain/boot"
step=begin
ends=0

say() {
  printf '%s lustrain: %s\n' "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$*"
}

# begin_step NAME [SECONDS]: a node that neither works nor fails is billed and nobody hears of it, so each step has an end.
begin_step() {
  step="$1"
  ends=$((SECONDS + ${2:-$patience}))
}

ended() {
  local status=$?
  if ((status != 0)); then
    say "failed with $status at: $step"
    echo "failed $step" >"$outcome"
    tell
  fi
}

# The group sees a running machine and nothing else, so the cluster's alarm counts this. It cannot make the boot any worse.
tell() {
  command -v aws >/dev/null || timeout 120 snap install aws-cli --classic || true
  if timeout 60 aws cloudwatch put-metric-data --namespace Lustrain --metric-name FirstBootFailed \
    --dimensions "Cluster=$cluster" --unit Count --value 1; then
    say "CloudWatch knows"
  else
    say "WARNING: CloudWatch does not know of this: the metric could not be written"
  fi
}

# in_time SECONDS COMMAND...: like `timeout`, for functions too, and not beyond the step's end. What no signal ends, as a mount
# that is stuck in the kernel, is left behind. In a condition bash would run on after an error inside of COMMAND.
in_time() {
  local over=$((SECONDS + $1)) work
  shift
  # A group of its own, so that what COMMAND started ends with it.
  set -m
  (
    set -e
    "$@"
  ) &
  work=$!
  set +m
  # Not `wait -n` beside a `sleep`: it misses a job that has ended before it looks.
  while kill -0 "$work" 2>/dev/null; do
    if ((SECONDS >= over || SECONDS >= ends)); then
      kill -TERM -- "-$work" || true
      sleep "$pause"
      kill -KILL -- "-$work" 2>/dev/null || true
      return 124
    fi
    sleep 0.1
  done
  wait "$work"
}

# retry TIMES SECONDS COMMAND...: each try has that long, all of them have until the step's end.
retry() {
  local times="$1" limit="$2" n status
  shift 2
  for ((n = 1; n <= times; n++)); do
    set +e
    in_time "$limit" "$@"
    status=$?
    set -e
    if ((status == 0)); then
      return
    fi
    say "try $n of $times failed with $status: $*"
    if ((SECONDS + pause >= ends)); then
      say "the time of this step is over"
      return 124
    fi
    sleep "$pause"
  done
  return 1
}

# fetch_bundle FOLDER
fetch_bundle() {
  mkdir -p "$1"
  if ! command -v aws >/dev/null; then
    # snapd does not see this script's environment.
    if [[ -n "${https_proxy:-}" ]]; then
      retry 5 60 snap set system "proxy.http=${http_proxy:-}" "proxy.https=$https_proxy"
    fi
    retry 5 300 snap install aws-cli --classic
  fi
  retry 10 120 aws s3 cp --recursive --only-show-errors "$bundle_uri" "$1"
}

mkdir -p "$root/var/log" "$(dirname "$outcome")"
exec >>"$root/var/log/lustrain-boot.log" 2>&1
trap ended EXIT
# From systemd, whose limit only matters where a step's own end did not come.
trap 'exit 143' TERM
say "begin"
