//! The migrations of a host, as its service (`platen host`) manages them.
//!
//! Each other host has a *door address* here: a loopback address that represents it. The service
//! listens there, on the ports from which that host's libvirt chooses one for each VM. On the other
//! host its own QEMU listens at that same address. So the address of a connection names the host,
//! and its port the VM. Unix sockets do the same: their folder names the host.
//!
//! ```text
//!  host A                                              host B
//!  QEMU ─► 127.80.0.2:49152 (doors)                    127.80.0.2:49152 ◄─ ... QEMU listens
//!             │ connections, listening socket                    ▲
//!             ▼                                                  │
//!          carrier: a source relay ═══════ links ═══════► carrier: a destination relay
//!             │ records                                          │ records
//!             ▼                                                  ▼
//!          registry ◄── service                        service ──► registry
//! ```
//!
//! A *carrier* is a process that carries one migration. It outlives the service: it has the door's
//! listening socket while its migration runs, so that it alone accepts QEMU's further connections
//! (multifd, postcopy) and knows how many there are (W18). A service that starts finds the carriers
//! again by their sockets in the registry's folder.
//!
//! A silent connection at a door comes from an NBD client, by which QEMU copies a disk, or from a
//! source QEMU that has not begun to write. The service asks the other host what awaits the
//! connection there ([`Awaits`]). The connection of an NBD client goes to the other host in a
//! session and carriers of its own, and the service keeps the door.
//!
//! | module | |
//! |---|---|
//! | [`config`](Config) | `/etc/platen/platen.toml` |
//! | `change` | the parts of a new configuration that a running service adopts |
//! | `doors`, `listener` | the listening sockets; the users who connect, and the kinds of connections |
//! | `place`, `target` | the place of a VM on its destination host, and its name there |
//! | `awaits` | what listens at a place: a QEMU that awaits a VM, or a server |
//! | `wanted` | the original destination of an intercepted connection |
//! | `acl` | the permissions of unix sockets |
//! | `peer_user`, `sock_diag`, `unix_diag`, `guest` | the user and the VM behind a socket |
//! | `channel`, `order`, `record` | the messages between service and carriers |
//! | `registry`, `carrier` | the service's and the carrier's end of that |
//! | `entrance`, `forward` | a carrier's connections, and forwarded ones |
//! | `qemu_conf` | platen's lines in libvirt's configuration |
//!
//! **What fails.** Three kinds of connections are reset at once, or forwarded unencrypted, as
//! configured: those of a user who may not migrate, those that are no migration, and those to a
//! host that cannot be reached. If a carrier is killed, its VM is in a state that `docs/wire.md`
//! promises, and its record says `failed`.
//!
//! **Limits.** 64 hosts, 4096 doors, 264 waiting connections at a door, 100 records of migrations
//! that have ended.

mod acl;
mod awaits;
mod carrier;
mod change;
mod channel;
mod config;
mod doors;
mod entrance;
mod error;
mod forward;
mod guest;
mod listener;
mod order;
mod peer_user;
mod place;
mod qemu_conf;
mod record;
mod registry;
mod sock_diag;
mod target;
mod unix_diag;
mod wanted;

pub use awaits::Awaits;
pub use carrier::Carrier;
pub use change::Change;
pub use channel::Channel;
pub use config::{Config, HostEntry, MetricsAddress, Policy, PortRange, DEFAULT_CONFIG};
pub use doors::{Door, Doorkeeper, Doors};
pub use entrance::{reset, DoorEntrance};
pub use error::HostError;
pub use forward::{forward, Care, MARK};
pub use guest::{of_connection, of_listener, of_path, of_process};
pub use listener::{connection, make_own_folder, DoorAddress, DoorListener};
pub use order::{Job, Order, SessionOrder, Task};
pub use peer_user::{connection_owner, listener_owner, AllowedUsers, Owner};
pub use place::Place;
pub use qemu_conf::{doors_missing, doors_off, doors_on, has_doors, setting_of, QEMU_CONF};
pub use record::{now, Event, Phase, Record, Role, Status, What};
pub use registry::{new_id, Found, Registry, Watcher};
pub use target::Target;
pub use unix_diag::{abstract_owner, unix_listeners};
pub use wanted::intercepted;
