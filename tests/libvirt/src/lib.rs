//! Two hosts on one machine, each with a real libvirt, for tests of `platen host`.
//!
//! ```text
//!  host a: network, mount, pid, uts and ipc namespaces     host b: the same
//!    a small Debian (scripts/fetch-libvirt), chroot          ...
//!      libvirtd ─ QEMU ─► door of b      ══ veth ══            QEMU ◄─ ...
//!    platen host (this machine's files, a's network)         platen host
//! ```
//!
//! A [`Lab`] starts and stops it all. The guest is that of the whole-VM tests, which recomputes
//! every byte of its memory. Nothing of this machine's `/etc`, `/run` or `/var` is touched.
//!
//! Errors name the step, and what was said. Limits: x86-64, root, QEMU under TCG.

mod disk;
mod domain;
mod host;
mod kubevirt;
mod lab;

pub use disk::DiskGuest;
pub use domain::domain;
pub use host::{Host, Service};
pub use kubevirt::Proxies;
pub use lab::{Lab, Migration, Side, FETCH};
