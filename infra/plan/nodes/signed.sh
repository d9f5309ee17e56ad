#!/bin/bash
# For scripts of the bundle that install a package of AWS: what to say, to download, and whose signature a package has.

say() {
  printf '%s lustrain: %s\n' "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$*"
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
