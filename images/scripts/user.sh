#!/bin/sh
# Makes the image's user, and lets the image's Python find the three layers: user.sh
#
# By hand, because useradd notes today's date; with an entry, because torch asks for the name of who runs it.
set -eu
for file in /etc/passwd /etc/group; do
    # Ubuntu's images come with a user 1000.
    sed -i '/^[^:]*:[^:]*:1000:/d' "$file"
done
echo 'lustrain:*:1000:1000:Lustrain:/home/lustrain:/bin/sh' >>/etc/passwd
echo 'lustrain:*:1000:' >>/etc/group
rm -rf /home/ubuntu
mkdir -p /home/lustrain
chown 1000:1000 /home/lustrain
chmod 0755 /home/lustrain
packages=$(python3 -B -c 'import site; print(site.getsitepackages()[0])')
mkdir -p "$packages"
printf '%s\n' /opt/lustrain/torch /opt/lustrain/app /opt/lustrain/code >"$packages/lustrain.pth"
