# What a node does from power-on to its sshd, as PID 1 of its own namespaces: $1 name, $2 the lab's folder, $3 address,
# $4 the lab's bridge, $5 what it is made of. What is written to its disk ($2/disks/$1) is kept over reboots; /run, /tmp,
# /dev/shm, /sys and sysctls start anew.
set -eu
name=$1 lab=$2 address=$3 bridge=$4 hardware=$2/hardware/$5
disk=$lab/disks/$name root=$lab/disks/$name/root

# Each mount(8) is a process, and a node has some fifty mounts: one program takes them from a table.
mount_table() {
    cat >"$disk/fstab"
    mount --all --fstab "$disk/fstab"
}

file_systems() {
    mount --make-rprivate /
    mkdir -p "$disk/upper" "$disk/work" "$disk/devices" "$root"
    mount -t overlay disk -o "lowerdir=$hardware/disk:$lab/image:/,upperdir=$disk/upper,workdir=$disk/work" "$root"
    mount_table <<END
proc $root/proc proc defaults
sysfs $root/sys sysfs ro
tmpfs $root/dev tmpfs mode=755
tmpfs $root/run tmpfs mode=755
tmpfs $root/tmp tmpfs mode=1777
tmpfs $root/mnt tmpfs mode=755
END
    cd "$root/dev"
    mkdir pts shm
    touch null zero full random urandom tty
    ln -s pts/ptmx ptmx
    ln -s /proc/self/fd fd
    ln -s fd/0 stdin
    ln -s fd/1 stdout
    ln -s fd/2 stderr
    cd "$root/run"
    mkdir -p sshd lock systemd/system simulated/fsx simulated/sysctl "$root/opt/simulated" "$root/mnt/upper" "$root/mnt/work"
    mount_table <<END
/dev/null $root/dev/null none bind
/dev/zero $root/dev/zero none bind
/dev/full $root/dev/full none bind
/dev/random $root/dev/random none bind
/dev/urandom $root/dev/urandom none bind
/dev/tty $root/dev/tty none bind
devpts $root/dev/pts devpts newinstance,ptmxmode=666,mode=620
tmpfs $root/dev/shm tmpfs mode=1777,size=$(cat "$hardware/shm_gib")g
$lab/programs $root/opt/simulated none bind
$lab/fsx $root/run/simulated/fsx none bind
END
    # Interpreters that the overlay does not show because they lie on another file system of the machine.
    while read -r folder; do
        [ -e "$root$folder/bin" ] || { mkdir -p "$root$folder" && mount --bind "$folder" "$root$folder"; }
    done <"$lab/folders"
}

# A write to a sysctl that is not of a namespace would change the machine that runs the lab: all is read-only but those,
# which come from the lab's own /proc. Whose namespace a sysctl is of, the kernel sees by who opens it.
guard_sysctls() {
    {
        echo "$root/proc/sys $root/proc/sys none bind,ro"
        for own in net fs/mqueue kernel/shmmax kernel/shmall kernel/shmmni kernel/sem kernel/msgmax kernel/msgmnb; do
            [ ! -e "/proc/sys/$own" ] || echo "/proc/sys/$own $root/proc/sys/$own none bind"
        done
    } | mount_table
}

# Simulated: plain files, which take any text and act on nothing, over global sysctls (stock values at every boot), the
# boot's id, processors and memory; an overlay over /sys with devices that are not there, lost at reboot.
simulate() {
    mount -t overlay sysfs -o "lowerdir=$hardware/sys:$root/sys,upperdir=$root/mnt/upper,workdir=$root/mnt/work" "$root/sys"
    umount "$root/mnt"
    cat /proc/sys/kernel/random/uuid >"$root/run/simulated/boot_id"
    {
        echo "$root/run/simulated/boot_id $root/proc/sys/kernel/random/boot_id none bind"
        while read -r key file value; do
            [ -e "$root/proc/sys/$key" ] || continue
            echo "$value" >"$root/run/simulated/sysctl/$file"
            echo "$root/run/simulated/sysctl/$file $root/proc/sys/$key none bind"
        done <"$lab/sysctls"
        cp -r "$hardware/proc" "$root/run/simulated"
        for file in "$root"/run/simulated/proc/*; do
            [ ! -e "$root/proc/${file##*/}" ] || echo "$file $root/proc/${file##*/} none bind"
        done
        for file in "$hardware"/dev/*; do
            [ -e "$file" ] || continue
            device=${file##*/}
            # A disk of its own, as large as the pattern and as empty.
            [ -e "$disk/devices/$device" ] || truncate --reference "$file" "$disk/devices/$device"
            : >"$root/dev/$device"
            echo "$disk/devices/$device $root/dev/$device none bind"
        done
    } | mount_table
}

network() {
    ip link set lo up
    # Not /sys/class/net/eth0: once an overlay has looked for a name in vain, it never looks below again.
    until grep -q 'eth0:' /proc/net/dev; do sleep .005; done
    ip -batch - <<END
addr add 169.254.169.254/32 dev lo
addr add $address/24 dev eth0
link set eth0 up
route add default via $bridge
END
}

file_systems
guard_sysctls
simulate
hostname "$name"
echo "$name" >"$root/etc/hostname"
[ -e "$root/etc/ssh/lab_host_key" ] || ssh-keygen -q -t ed25519 -N '' -C '' -f "$root/etc/ssh/lab_host_key"
cd "$root"
mkdir -p .old
pivot_root . .old
cd /
umount -l /.old
network
# What units do before sshd, sshd, and then the rest of the units beside it.
/opt/simulated/boot /usr/sbin/sshd -f /dev/null -o HostKey=/etc/ssh/lab_host_key -o UsePAM=yes \
    -o PermitRootLogin=prohibit-password -o PasswordAuthentication=no -o UseDNS=no -o MaxStartups=100 \
    -o 'Subsystem=sftp internal-sftp' -E /run/sshd.log
exec tini -s -- sleep infinity
