//! The guest as libvirt's XML.

/// A guest with `mib` MiB of RAM and a console at a socket.
///
/// It must not write to its memory while it migrates: under TCG, QEMU before 9.0 loses some dirty
/// pages of a RAM that is a multiple of 256 KiB, and libvirt makes it one.
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
  <features><acpi/></features>
  <cpu mode='custom' match='exact' check='none'><model>qemu64</model></cpu>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
    <controller type='usb' model='none'/>
    <serial type='unix'><source mode='bind' path='/run/{name}.console'/><target port='0'/></serial>
    <memballoon model='none'/>
  </devices>
</domain>
"
    )
}
