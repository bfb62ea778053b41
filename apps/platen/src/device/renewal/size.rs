//! The growth of a device that is asked for with `set`.

use super::Serving;
use crate::size::Size;
use anyhow::{ensure, Context};
use std::os::fd::AsFd;

impl Serving {
    /// Refuses a size that the device cannot change to. The new server checks the limits that only
    /// the kernel knows.
    pub(super) fn check_size(&self, Size(wanted): Size) -> anyhow::Result<()> {
        let (pages, capacity) = store::sizes(self.store.as_fd())?;
        let [present, most] = [pages, capacity].map(|pages| pages * device::PAGE as u64);
        ensure!(
            wanted >= present,
            "--size: the device has {present} bytes, and {wanted} are fewer: a device does not \
             shrink; end it and start it with --size {wanted}"
        );
        ensure!(
            wanted <= most,
            "--size: the store was made with room for {most} bytes, not for {wanted}: end the \
             device and start it with --size {wanted}"
        );
        if wanted == present || !self.plan.args.swap {
            return Ok(());
        }
        ensure!(
            self.disk.is_none(),
            "--size: the kernel stops all requests of an NBD disk while its size changes, and \
             reconnects no server meanwhile: not while it swaps to it; serve another device beside \
             this one, or end it and start it with --size {wanted}"
        );
        let disk = self.disk().context("it has no disk yet")?;
        swap::area::can_extend(&disk).context("--size")
    }

    /// The part of a requested growth that the device still lacks; `None` if it lacks nothing.
    pub(super) fn smaller_than_asked(&self) -> Option<String> {
        let wanted = self.plan.pages;
        let pages = store::sizes(self.store.as_fd()).map_or(wanted, |(pages, _)| pages);
        if pages < wanted {
            return Some(format!(
                "--size: there was no memory for the table: the device still has {} bytes",
                pages * device::PAGE as u64
            ));
        }
        let disk = self.device.map(ublk::disk)?;
        let (wanted, size) = (wanted * device::PAGE as u64, swap::area::size(&disk).unwrap_or(0));
        if size < wanted {
            return Some(format!(
                "--size: {} still has {size} bytes: the device's log says why",
                disk.display()
            ));
        }
        let beyond = swap::area::beyond(&disk).unwrap_or(0);
        if self.plan.args.swap && beyond > 0 {
            return Some(format!(
                "--size: the device has its new size, and the kernel does not swap to the last \
                 {beyond} bytes of it: its log says why"
            ));
        }
        None
    }
}
