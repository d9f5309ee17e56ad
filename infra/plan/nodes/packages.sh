#!/bin/bash
# For scripts of a bundle that install packages: what to say, to try again, to install, and whose keys and signatures are good.

pause="${LUSTRAIN_PAUSE_SECONDS:-10}"

say() {
  printf '%s lustrain: %s\n' "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$*"
}

# try TIMES SECONDS COMMAND...: each try has that long. In the foreground, so that whoever ends the script ends COMMAND too.
try() {
  local times="$1" limit="$2" n
  shift 2
  for ((n = 1; n <= times; n++)); do
    if timeout --foreground --kill-after=10 "$limit" "$@"; then
      return
    fi
    say "try $n of $times failed: $*"
    sleep "$pause"
  done
  return 1
}

# A try outlasts the wait for others that install, as Ubuntu's own upgrades do after a boot; for what reads the same lists at that
# moment, apt-get does not wait by itself.
apt() {
  DEBIAN_FRONTEND=noninteractive try 5 600 apt-get -q -o DPkg::Lock::Timeout="${lock_seconds:-240}" "$@"
}

# install_packages [OPTION...] PACKAGE...: after an installation that was cut off, apt-get refuses every other one until dpkg is
# done; where dpkg is busy, apt-get waits. What is fetched first is not cut off half installed.
install_packages() {
  DEBIAN_FRONTEND=noninteractive timeout --foreground 300 dpkg --configure -a || say "dpkg is busy, or has packages that it cannot configure"
  apt install -y --no-install-recommends --download-only "$@"
  apt install -y --no-install-recommends "$@"
}

# is_key FILE FINGERPRINT: a key comes from where the packages come from, so that only the fingerprint says whose it is.
is_key() {
  local listed
  listed="$(gpg --batch --show-keys --with-colons "$1")"
  [[ "$(grep -c '^pub:' <<<"$listed")" == 1 && "$(awk -F: '/^fpr:/ {print $10; exit}' <<<"$listed")" == "$2" ]]
}

# fetch URL FILE PROGRAM
fetch() {
  if ! curl -fsS --retry 8 --retry-delay 5 --connect-timeout 20 --max-time 120 -o "$2" "$1"; then
    say "cannot download $1; fix: let nodes reach it, or take an image with $3"
    return 1
  fi
}

# is_signed FOLDER KEYS SIGNATURE PACKAGE FINGERPRINT: the file of keys comes from where the package comes from, so that only the
# fingerprint says whose they are. The last word of VALIDSIG is that of the primary key.
is_signed() {
  local status signer
  export GNUPGHOME="$1"
  gpg --batch --quiet --import "$2"
  status="$(gpg --batch --status-fd 1 --verify "$3" "$4" 2>/dev/null)" || return 1
  signer="$(sed -n 's/^\[GNUPG:\] VALIDSIG .* //p' <<<"$status")"
  [[ "$status" != *REVKEYSIG* && "$signer" == "$5" ]]
}
