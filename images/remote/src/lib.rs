//! Images of another host: a server for the files of a folder, and a client that reads them.
//!
//! ```text
//!  HOST WITH THE IMAGES                         HOST WITH THE QEMU
//!
//!  folder ─► Server ══ one thread a connection ══ Client ─► image::RemoteFile ─► player
//!              └ sessions: open files, locks        └ pool: connections that wait for a reader
//! ```
//!
//! A [`Client`] opens files by their names in the folder, and reads ranges of them. A connection
//! carries one request at a time; each thread that reads takes a connection of its own. The bytes
//! cross the network as they are stored: compressed.
//!
//! **Sessions.** The client chooses a random session. All its connections name the session, and
//! connections of another process may name it too. The server holds the session's open files and
//! their locks while there is a connection, and [`Patience`] longer. A client whose connection ends
//! makes another one and repeats its request: a read changes nothing. Therefore a restore survives
//! a lost link and a restart of the server.
//!
//! **A wrong byte.** A file is identified by a stamp of inode, length and modification time. Each
//! read names the stamp. A file that was replaced has another stamp, and is refused.
//! With TLS no byte can be changed on the way. Every unit of an image has a checksum besides.
//!
//! **What fails.** [`RemoteError`] names the file and the host. No bytes of a peer cause a panic
//! or an allocation without a bound: requests have at most 544 bytes, replies at most the bytes
//! that were asked for, or 1 KiB of text.
//!
//! **Limits.** 256 connections, 64 sessions, 512 files a session, 1 MiB a read. The server reads
//! regular files below its folder, follows no symbolic link, and serves only images, packs and hot
//! sets. `docs/wire.md`, section 8, has the bytes.

mod client;
mod error;
mod folder;
mod pool;
mod server;
mod sessions;
mod wire;

pub use client::Client;
pub use error::RemoteError;
pub use folder::{Folder, TakeLock};
pub use server::{answer, Connected, Server};
pub use sessions::{Ended, Patience, Sessions};
pub use wire::{ask, Lock, Request, Status, Token, MAX_READ};
