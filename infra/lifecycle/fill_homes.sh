#!/bin/bash
# fill_homes.sh IMAGE HOMES: give the shared folder HOMES what the image has in its own home folder, keys and shell settings, or
# nobody could log in. All nodes do this at once, and one may die in the middle, so an entry is copied under another name and
# then renamed: it is there whole or not at all. What HOMES has already stays as it is, with its owner, mode and files. A node that
# died leaves a folder .lustrain-home-*, which may be deleted.
set -euo pipefail
shopt -s dotglob nullglob

image="$1"
homes="$2"

# A new file system's top folder may not be what an image's /home is.
if [[ -z "$(ls -A "$homes")" ]]; then
  chown --reference="$image" "$homes"
  chmod --reference="$image" "$homes"
fi

for entry in "$image"/*; do
  name="${entry##*/}"
  if [[ -e "$homes/$name" || -L "$homes/$name" ]]; then
    continue
  fi
  aside="$(mktemp -d "$homes/.lustrain-home-XXXXXXXX")"
  cp -a "$entry" "$aside/$name"
  # mv fails, or with -n does nothing, where another node was faster.
  mv -nT "$aside/$name" "$homes/$name" || [[ -e "$homes/$name" || -L "$homes/$name" ]]
  rm -rf "$aside"
done
