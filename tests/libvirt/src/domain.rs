//! The guest as libvirt's XML.

/// The emulator's path on a host.
pub(crate) const EMULATOR: &str = "/usr/bin/qemu-odd-ram";

/// RAM that the emulator adds.
pub(crate) const ODD_BYTES: u64 = 8192;

/// The emulator: QEMU with [`ODD_BYTES`] of RAM more than libvirt asks for. Under TCG, QEMU before
/// 9.0 loses dirty pages of a RAM that is a multiple of 256 KiB, and libvirt makes every RAM one.
/// The kernel of an idle guest then crashes after some migrations, with and without platen.
pub(crate) const EMULATOR_SCRIPT: &str = r#"#!/bin/sh
for argument; do
  shift
  case $argument in
  *'"id":"pc.ram","size":'*)
    bytes=${argument##*'"size":'}; bytes=${bytes%%[!0-9]*}
    argument=${argument%%'"size":'*}'"size":'$((bytes + 8192))${argument#*'"size":'"$bytes"} ;;
  esac
  if [ "$before" = -m ]; then
    kib=${argument#size=}; case $kib in *k) kib=${kib%k} ;; *) kib=$((kib * 1024)) ;; esac
    argument=size=$((kib + 8))k
  fi
  before=$argument
  set -- "$@" "$argument"
done
exec /usr/bin/qemu-system-x86_64 "$@"
"#;

/// A guest with `mib` MiB of RAM and a console at a socket. A crash ends it, because a guest that
/// boots again looks like one that runs.
#[must_use]
pub fn domain(name: &str, mib: u32) -> String {
    format!(
        "<domain type='qemu'>
  <name>{name}</name>
  <memory unit='MiB'>{mib}</memory>
  <vcpu>1</vcpu>
  <os>
    <type arch='x86_64' machine='pc-q35-7.2'>hvm</type>
    <kernel>/guest/kernel</kernel>
    <initrd>/guest/initramfs</initrd>
    <cmdline>console=ttyS0 quiet loglevel=1 no_timer_check panic=-1 init_on_free=1 init_on_alloc=0 \
mitigations=off nokaslr audit=0 rdinit=/init</cmdline>
  </os>
  <on_reboot>destroy</on_reboot>
  <on_crash>destroy</on_crash>
  <features><acpi/></features>
  <cpu mode='custom' match='exact' check='none'><model>qemu64</model></cpu>
  <devices>
    <emulator>{EMULATOR}</emulator>
    <controller type='usb' model='none'/>
    <serial type='unix'><source mode='bind' path='/run/{name}.console'/><target port='0'/></serial>
    <memballoon model='none'/>
  </devices>
</domain>
"
    )
}
