//! A guest whose disk is on one host, and goes with it to the other: `virsh migrate
//! --copy-storage-all`.
//!
//! The guest is a boot sector that writes numbered sectors as fast as it can, one behind the other
//! in a ring of [`RING`]. So the disk changes while it is copied, and a write that was lost shows:
//! of the numbers in the ring the lowest and the highest are less than [`RING`] apart.

use crate::host::Host;
use crate::lab::{Lab, Migration, Side};
use anyhow::{ensure, Context, Result};
use std::fs::{self, File};
use std::os::unix::fs::{chown, FileExt, MetadataExt};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// The name of its domain.
pub(crate) const NAME: &str = "g2";
/// The path of the disk, on both hosts.
const PATH: &str = "/tmp/g2.img";
/// The path of what both hosts have of it beforehand, if the disk is an overlay.
const BASE: &str = "/tmp/g2.base";
/// The path of a copy of an overlay with its base, for a look.
const COPY: &str = "/tmp/g2.raw";
/// libvirt-qemu.
const OWNER: u32 = 64055;
const SECTOR: u64 = 512;
/// The first sector of the ring, and their number.
const FIRST: u64 = 2048;
const RING: u64 = 1024;
/// The limit of what only a hang takes.
const PATIENCE: Duration = Duration::from_secs(400);

/// Increments the counter at 0x7e00, and writes the sector there to LBA 2048 + counter % 1024, for
/// ever. The packet of INT 13h is at 0x7c60, the number of the drive at 0x7c70.
const BOOT: &[u8] = &[
    0x31, 0xc0, 0x8e, 0xd8, 0x8e, 0xc0, 0x8e, 0xd0, // xor ax, ax; mov ds, es, ss, ax
    0xbc, 0x00, 0x7c, // mov sp, 0x7c00
    0x88, 0x16, 0x70, 0x7c, // mov [0x7c70], dl
    0x66, 0xc7, 0x06, 0x00, 0x7e, 0x00, 0x00, 0x00, 0x00, // mov dword [0x7e00], 0
    0x66, 0xff, 0x06, 0x00, 0x7e, // again: inc dword [0x7e00]
    0x66, 0xa1, 0x00, 0x7e, // mov eax, [0x7e00]
    0x66, 0x25, 0xff, 0x03, 0x00, 0x00, // and eax, 1023
    0x66, 0x05, 0x00, 0x08, 0x00, 0x00, // add eax, 2048
    0x66, 0xa3, 0x68, 0x7c, // mov [0x7c68], eax
    0xbe, 0x60, 0x7c, // mov si, 0x7c60
    0xb8, 0x00, 0x43, // mov ax, 0x4300
    0x8a, 0x16, 0x70, 0x7c, // mov dl, [0x7c70]
    0xcd, 0x13, // int 0x13
    0xeb, 0xd9, // jmp again
];
/// One sector from 0000:7e00.
const PACKET: &[u8] = &[0x10, 0, 1, 0, 0x00, 0x7e, 0, 0];

/// The guest.
#[derive(Debug)]
pub struct DiskGuest {
    /// Where it runs.
    pub at: Side,
    /// The disk's bytes behind the ring, up to where it is empty.
    content: Vec<u8>,
    /// Bytes of the disk.
    size: u64,
    /// The disk is an overlay (qcow2), and what it was at first is on both hosts.
    overlay: bool,
}

impl DiskGuest {
    /// Boots it from a disk of `size` bytes that has `content` behind the ring, and holes. As an
    /// `overlay`, the disk has only what the guest writes.
    ///
    /// # Errors
    /// A step fails.
    pub fn boot(lab: &Lab, at: Side, size: u64, content: Vec<u8>, overlay: bool) -> Result<Self> {
        let guest = Self { at, content, size, overlay };
        let host = lab.host(at);
        if overlay {
            for side in [Side::A, Side::B] {
                guest.fill(&guest.make_file(lab.host(side), BASE)?)?;
            }
            guest.make_disk(host)?;
        } else {
            guest.fill(&guest.make_file(host, PATH)?)?;
        }
        fs::write(host.file("/tmp/g2.xml"), domain(overlay))?;
        host.virsh(&["define", "/tmp/g2.xml"])?;
        host.virsh(&["start", NAME])?;
        // The ring is full.
        guest.wait_for_writes(lab, RING)?;
        Ok(guest)
    }

    /// Writes what the disk has at first.
    fn fill(&self, disk: &File) -> Result<()> {
        disk.write_all_at(BOOT, 0)?;
        disk.write_all_at(PACKET, 0x60)?;
        disk.write_all_at(&[0x55, 0xaa], 510)?;
        disk.write_all_at(&self.content, (FIRST + RING) * SECTOR)?;
        Ok(())
    }

    /// An empty disk, in place of what is there.
    fn make_disk(&self, host: &Host) -> Result<()> {
        if !self.overlay {
            return self.make_file(host, PATH).map(drop);
        }
        // In /tmp the kernel lets even root create no file in place of another user's
        // (fs.protected_regular).
        let _ = fs::remove_file(host.file(PATH));
        let (well, said) =
            host.run(&["qemu-img", "create", "-f", "qcow2", "-b", BASE, "-F", "raw", PATH])?;
        ensure!(well, "qemu-img on {}: {said}", host.name);
        Ok(chown(host.file(PATH), Some(OWNER), Some(OWNER))?)
    }

    /// An empty file, in place of what is there.
    fn make_file(&self, host: &Host, path: &str) -> Result<File> {
        let path = host.file(path);
        let _ = fs::remove_file(&path);
        let disk = File::options().read(true).write(true).create_new(true).open(&path)?;
        disk.set_len(self.size)?;
        chown(&path, Some(OWNER), Some(OWNER))?;
        Ok(disk)
    }

    /// The highest number in the ring.
    fn highest(&self, lab: &Lab) -> Result<u64> {
        if !self.overlay {
            return Ok(ring(&self.bytes(lab)?)?.1);
        }
        // QEMU writes the overlay's tables late, and all of them when the guest is stopped.
        lab.host(self.at).virsh(&["suspend", NAME])?;
        let bytes = self.bytes(lab);
        lab.host(self.at).virsh(&["resume", NAME])?;
        Ok(ring(&bytes?)?.1)
    }

    /// A file with the disk's bytes, where the guest is, stopped.
    fn bytes(&self, lab: &Lab) -> Result<PathBuf> {
        if !self.overlay {
            return Ok(self.path(lab, self.at));
        }
        let host = lab.host(self.at);
        // QEMU has the disk open.
        let words = ["qemu-img", "convert", "-U", "-f", "qcow2", "-O", "raw", PATH, COPY];
        let (well, said) = host.run(&words)?;
        ensure!(well, "qemu-img on {}: {said}", host.name);
        Ok(host.file(COPY))
    }

    fn path(&self, lab: &Lab, side: Side) -> PathBuf {
        lab.host(side).file(PATH)
    }

    /// Waits until the highest number in the ring has risen by so many.
    fn wait_for_writes(&self, lab: &Lab, count: u64) -> Result<()> {
        let before = self.highest(lab)?;
        let until = Instant::now() + PATIENCE;
        while self.highest(lab)? < before + count {
            ensure!(Instant::now() < until, "{NAME} writes nothing: {before}");
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// Begins to migrate it to the other host with its disk.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn begin(&self, lab: &Lab, words: &[&str]) -> Result<Migration> {
        self.make_disk(lab.host(self.at.other()))?;
        let what = if self.overlay { "--copy-storage-inc" } else { "--copy-storage-all" };
        lab.begin_of(NAME, self.at, &[&[what], words].concat())
    }

    /// Waits for a migration that has to succeed, and checks the disk.
    ///
    /// # Errors
    /// It fails, or a byte is not as it was.
    pub fn arrive(&mut self, lab: &Lab, migration: Migration) -> Result<()> {
        let (well, said) = migration.ends()?;
        ensure!(well, "virsh migrate failed: {said}\n{}", lab.logs());
        self.at = self.at.other();
        self.check(lab)
    }

    /// It runs here and nowhere else, writes to its disk, and no write of it is missing there.
    ///
    /// # Errors
    /// It is not so.
    pub fn check(&self, lab: &Lab) -> Result<()> {
        let host = lab.host(self.at);
        ensure!(host.runs(NAME)?, "{NAME} does not run on {}", host.name);
        let other = lab.host(self.at.other());
        ensure!(!other.runs(NAME)?, "{NAME} runs on {}, too", other.name);
        self.wait_for_writes(lab, 1)?;
        host.virsh(&["suspend", NAME])?;
        let path = self.bytes(lab)?;
        let (lowest, highest) = ring(&path)?;
        ensure!(highest - lowest < RING, "a write is missing: {lowest} to {highest}");
        let disk = File::open(&path)?;
        let mut got = vec![0; self.content.len()];
        disk.read_exact_at(&mut got, (FIRST + RING) * SECTOR)?;
        let differs = got.iter().zip(&self.content).position(|(got, had)| got != had);
        ensure!(differs.is_none(), "byte {differs:?} behind the ring is not as it was");
        is_empty(&disk, (FIRST + RING) * SECTOR + self.content.len() as u64, self.size)?;
        host.virsh(&["resume", NAME])?;
        Ok(())
    }

    /// Bytes that the disk's file takes where it runs.
    ///
    /// # Errors
    /// There is no such file.
    pub fn allocated(&self, lab: &Lab) -> Result<u64> {
        Ok(fs::metadata(self.path(lab, self.at))?.blocks() * 512)
    }

    /// Ends it.
    ///
    /// # Errors
    /// libvirt refuses.
    pub fn end(self, lab: &Lab) -> Result<()> {
        lab.host(self.at).virsh(&["destroy", NAME])?;
        for side in [Side::A, Side::B] {
            let _ = lab.host(side).run(&["virsh", "-q", "undefine", NAME])?;
            for file in [PATH, BASE, COPY] {
                let _ = fs::remove_file(lab.host(side).file(file));
            }
        }
        Ok(())
    }
}

/// The lowest and the highest number in the ring.
fn ring(path: &PathBuf) -> Result<(u64, u64)> {
    let disk = File::open(path).with_context(|| path.display().to_string())?;
    let mut bytes = vec![0; usize::try_from(RING * SECTOR)?];
    disk.read_exact_at(&mut bytes, FIRST * SECTOR)?;
    let numbers = bytes
        .chunks_exact(usize::try_from(SECTOR)?)
        .map(|sector| u64::from(u32::from_le_bytes([sector[0], sector[1], sector[2], sector[3]])));
    let (mut lowest, mut highest) = (u64::MAX, 0);
    for number in numbers {
        (lowest, highest) = (lowest.min(number), highest.max(number));
    }
    Ok((lowest, highest))
}

/// Whether the disk has nothing but zeros there.
fn is_empty(disk: &File, mut from: u64, to: u64) -> Result<()> {
    let mut piece = vec![0; 1 << 20];
    while from < to {
        let now = usize::try_from((to - from).min(piece.len() as u64))?;
        disk.read_exact_at(&mut piece[..now], from)?;
        ensure!(piece[..now].iter().all(|byte| *byte == 0), "something is behind byte {from}");
        from += now as u64;
    }
    Ok(())
}

fn domain(overlay: bool) -> String {
    let kind = if overlay { "qcow2" } else { "raw" };
    format!(
        "<domain type='qemu'>
  <name>{NAME}</name>
  <memory unit='MiB'>32</memory>
  <vcpu>1</vcpu>
  <os><type arch='x86_64' machine='pc-q35-7.2'>hvm</type><boot dev='hd'/></os>
  <on_reboot>destroy</on_reboot>
  <on_crash>destroy</on_crash>
  <cpu mode='custom' match='exact' check='none'><model>qemu64</model></cpu>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
    <controller type='usb' model='none'/>
    <disk type='file' device='disk'>
      <driver name='qemu' type='{kind}'/>
      <source file='{PATH}'/>
      <target dev='sda' bus='sata'/>
    </disk>
    <memballoon model='none'/>
  </devices>
</domain>
"
    )
}
